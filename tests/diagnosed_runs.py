"""Short runs with injected problems, and the doctor's findings about them."""

import ctypes
import json
import multiprocessing
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tests.environment import CACHE
from tests.ranks import run_ranks
from trimaran.core import Finding, Recipe, dump_recipe, parse_recipe
from trimaran.doctor import StepBreakdown, diagnose, patch_settings, read_evidence, step_breakdown
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import choose
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
SMALL = (
    "model.shape={layers: 4, hidden: 64, heads: 4, kv_heads: 2, ffn: 128}",
    "data.seq_len=128",
    "data.workers=0",
    "train.steps=25",
    "train.global_batch=16",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
    "train.save=false",
)


def recipe_of(*settings: str) -> Recipe:
    """Return a recipe with steps of a few tens of milliseconds."""
    return parse_recipe("", name="test", overrides=[*SMALL, *settings])


def train(recipe: Recipe, folder: Path, *injections: Callable[[], None]) -> RunDirectory:
    """Train the recipe in forked ranks, with the plan that the planner chooses.

    Each rank calls `injections` first; they are pickled. It is in the network of this process.
    """
    folder.mkdir(exist_ok=True)
    outline = outline_if_known(recipe.model, recipe.data)
    plan = choose(recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline)
    run = create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)
    ranks = plan.mesh.world_size
    codes = run_ranks(ranks, _train, run.path, Path(f"/proc/{os.getpid()}/ns/net"), injections, timeout=600.0)
    assert codes == [0] * ranks, run.events(0).read_text()
    return run


def _train(path: Path, network: Path, injections: Sequence[Callable[[], None]]) -> int:
    if network.readlink() != Path("/proc/self/ns/net").readlink():
        with network.open("rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), NEW_NETWORK) == 0
    for inject in injections:
        inject()
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE)


def with_patch(recipe: Recipe, finding: Finding) -> Recipe:
    """Return the recipe with the finding's patch applied, as its command does."""
    return parse_recipe(dump_recipe(recipe), name="test", overrides=patch_settings(finding.patch))


def findings(run: RunDirectory, *, against: RunDirectory | None = None) -> dict[str, Finding]:
    """Return the doctor's findings about a run, by code."""
    return {each.code: each for each in diagnose(read_evidence(run, against=against))}


def measured(run: RunDirectory) -> StepBreakdown:
    found = step_breakdown(read_evidence(run))
    assert found is not None
    return found


def in_slow_network(rate: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` in its own network namespace with a loopback limited to `rate`, and return its result."""
    shape = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms"
    return _call_in_namespace(NEW_NETWORK, ("ip link set lo up", shape), function, args)


def in_container(cgroup: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` in a memory cgroup, which it and its children see as the machine's, and return its result."""
    mounts = ("mount --make-rprivate /", f"mount --bind {cgroup} {cgroup.parent}")

    def inside(*args: Any) -> Any:
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        return function(*args)

    return _call_in_namespace(NEW_MOUNTS, mounts, inside, args)


def _call_in_namespace(flag: int, commands: Sequence[str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `function` in a process with its own namespace, after these commands, and return its result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_namespace, args=(flag, commands, theirs, function, args))
    child.start()
    try:
        assert ours.poll(600), "no answer"
        answer, error = ours.recv()
    finally:
        child.kill()
        child.join()
    assert not error, error
    return answer


def _in_namespace(
    flag: int, commands: Sequence[str], pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(flag):
            raise OSError(ctypes.get_errno(), "no namespace")
        for command in commands:
            subprocess.run(command.split(), check=True)
        pipe.send((function(*args), None))
    except BaseException as error:
        pipe.send((None, repr(error)))


def write_chats(path: Path, *, lengths: list[int]) -> str:
    """Write chats whose answers cycle through these lengths in words; return the value of `data.path`."""
    with path.open("w") as file:
        for number in range(400):
            question = {"role": "user", "content": "why?"}
            answer = {"role": "assistant", "content": "because " * lengths[number % len(lengths)]}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return str(path)


def write_images(folder: Path, *, sides: list[int]) -> str:
    """Write questions about square images with random sides out of `sides`; return the value of `data.path`."""
    folder.mkdir()
    chance = random.Random(0)
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(200):
            side = chance.choice(sides)
            Image.new("RGB", (side, side), (number, 0, 0)).save(folder / f"{number}.png")
            question = {"from": "human", "value": "<image>\nwhy?"}
            sample = {"conversations": [question, {"from": "gpt", "value": "because"}], "image": f"{number}.png"}
            file.write(json.dumps(sample) + "\n")
    return str(folder / "chat.jsonl")


# One image per row, two rows per rank, assigned in the order of the data.
VLM_SETTINGS = (
    "cluster=2xcpu",
    "model.family=vlm",
    "model.preset=tiny",
    "model.shape={}",
    "data.source=chat",
    "data.seq_len=160",
    "data.samples.max_pixels=25600",
    "data.samples.batching=pad",
    "data.samples.balance=false",
    "train.global_batch=4",
)

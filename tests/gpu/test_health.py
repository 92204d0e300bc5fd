"""The doctor on a real GPU that is full, fragmented, memory-bound or throttled.

One fork server imports torch and forks all ranks, so that the import is paid once.
"""

import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trimaran.core import Finding, Recipe, parse_recipe
from trimaran.doctor import StepBreakdown, apply_patch, diagnose, read_evidence, step_breakdown
from trimaran.machine import parse_cluster
from trimaran.models import outline_if_known, spec_of
from trimaran.nets import DecoderLayer
from trimaran.planner import choose
from trimaran.runs import RunDirectory, Sampler, create_run, open_run
from trimaran.train import read_rank_info, run_worker

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]

MIB = 1 << 20
SERVER = multiprocessing.get_context("forkserver")
SHORT = ("train.sample.tokens=0", "train.evaluate.batches=0", "train.save=false")
SMALL = (
    "model.shape={layers: 12, hidden: 512, heads: 8, kv_heads: 8, ffn: 1536}",
    "data.seq_len=256",
    "train.steps=30",
    "train.global_batch=32",
    "plan.micro_batch=32",
    "plan.grad_accum=1",
    "plan.precision=bf16",
    "plan.compile=false",
)
# Two layers under a head of 128,256 tokens, whose logits are written and read in full.
WORDY = (
    "model.preset=llama-3.2-1b",
    "model.shape={layers: 2}",
    "data.seq_len=2048",
    "plan.micro_batch=4",
    "plan.precision=bf16",
    "plan.compile=false",
    "plan.loss=logits",
)


class MemoryHog:
    """Takes almost all of the device's memory, and then a larger buffer in every step.

    The previous buffer is too small for the next one, and both do not fit: the allocator must free its cached blocks
    and retry. The step's own memory always fits, so there is no out-of-memory error.
    """

    AT = 6  # of its calls: by then a step has allocated its memory
    LEFT, FIRST, MORE = 900 * MIB, 500 * MIB, 8 * MIB

    def __init__(self) -> None:
        self._layer: nn.Module | None = None
        self._held: Tensor | None = None
        self._calls = 0

    def enter(self, layer: nn.Module, device: torch.device) -> None:
        """Run before a layer computes; allocates once per step, at the first layer."""
        self._layer = layer if self._layer is None else self._layer
        if layer is not self._layer:
            return
        self._calls += 1
        if self._calls < self.AT:
            return
        if self._held is None:
            free, _ = torch.cuda.mem_get_info(device)
            self._held = torch.empty(free - self.LEFT, dtype=torch.uint8, device=device)
        torch.empty(self.FIRST + self._calls * self.MORE, dtype=torch.uint8, device=device)


def allocate_most() -> None:
    """Add a memory hog to the ranks that this process becomes."""
    forward, hog = DecoderLayer.forward, MemoryHog()

    def forward_after_allocation(self: DecoderLayer, stream: Tensor, *rest: object) -> object:
        hog.enter(self, stream.device)
        return forward(self, stream, *rest)  # type: ignore[arg-type]

    DecoderLayer.forward = forward_after_allocation  # type: ignore[assignment,method-assign]


def allocate_most_with_expandable_segments() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    allocate_most()


def train_trajectory(path: str, plant: Callable[[], None] | None) -> None:
    """Run the only rank of a run."""
    if plant is not None:
        plant()
    rank_info = read_rank_info(os.environ | {"RANK": "0", "WORLD_SIZE": "1"})
    sys.exit(run_worker(open_run(Path(path)), rank_info, cache=Path(path).parent / "cache"))


@contextmanager
def sampled(run: RunDirectory) -> Iterator[None]:
    """Write samples of this machine into the run, like its sidecar."""
    sampler = Sampler(run, 0, supervisor=os.getpid(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.5):
            sampler.take()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sampler.close()


def recipe_of(*settings: str) -> Recipe:
    """Return a recipe for one device of this machine."""
    name = parse_cluster("auto").device.name
    return parse_recipe("", name="test", overrides=[*SHORT, f"cluster=1x{name}", *settings])


def train(recipe: Recipe, folder: Path, plant: Callable[[], None] | None = None) -> RunDirectory:
    """Train the recipe in a rank of the fork server, with a sampler."""
    SERVER.set_forkserver_preload([__name__, "torch._dynamo"])
    plan = choose(
        recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline_if_known(recipe.model, recipe.data)
    )
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan)
    rank = SERVER.Process(target=train_trajectory, args=(str(run.path), plant))
    with sampled(run):
        rank.start()
        rank.join(240)
        rank.kill()
        rank.join()
    assert rank.exitcode == 0, run.events(0).read_text()
    return run


def findings(run: RunDirectory) -> dict[str, Finding]:
    found = {each.code: each for each in diagnose(read_evidence(run))}
    print(*(f"{each.code} {each.verdict} {each.patch or each.fix}" for each in found.values()), sep="\n")
    return found


def measured(run: RunDirectory) -> StepBreakdown:
    found = step_breakdown(read_evidence(run))
    assert found is not None
    return found


def test_full_and_fragmented_memory_is_found_and_expandable_segments_help(tmp_path: Path) -> None:
    recipe = recipe_of(*SMALL, "plan.cuda_graphs=false")  # a replayed step would not run the hog
    run = train(recipe, tmp_path, allocate_most)
    found = findings(run)
    assert {"F060", "F061"} <= found.keys()
    begs, full = found["F060"], found["F061"]
    assert (begs.culprit, full.culprit) == ("allocator of rank 0", "the device of rank 0")
    assert begs.evidence["retries"] >= 10
    assert full.evidence["used"] > 0.95 * full.evidence["total"]
    assert "instead of" in full.expected_effect
    assert apply_patch(recipe, full.patch).plan != recipe.plan
    assert begs.patch == {"faults.expandable_segments": True}
    fixed = train(recipe, tmp_path, allocate_most_with_expandable_segments)
    assert "F060" not in findings(fixed)
    assert measured(fixed).step < measured(run).step


def test_a_device_filled_by_another_process_is_found(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="GPUs are sampled with the extra `metrics`")
    recipe = recipe_of(*SMALL, "train.steps=100")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 5000 * MIB, dtype=torch.uint8, device="cuda")  # by the process of this test
    try:
        found = findings(train(recipe, tmp_path))
    finally:
        del held
        torch.cuda.empty_cache()
    assert found["F061"].culprit == "the device of rank 0"
    assert found["F061"].evidence["others"] > 0.8 * found["F061"].evidence["total"]
    assert found["F061"].patch
    assert "find the other processes on the device" in found["F061"].fix


def test_a_memory_bound_run_is_found_and_the_patch_moves_fewer_bytes(tmp_path: Path) -> None:
    recipe = recipe_of(*WORDY, "train.global_batch=16", "plan.grad_accum=4", "train.steps=25")
    slow = train(recipe, tmp_path)
    found = findings(slow)
    assert "F069" not in found  # busy at its full clock
    bytes_ = found["F004"]
    assert bytes_.culprit == "memory bandwidth"
    assert bytes_.patch
    assert bytes_.gain is not None
    fast = train(apply_patch(recipe, bytes_.patch), tmp_path)
    before, after = measured(slow).step, measured(fast).step
    print(f"{before:.4f} s a step, {after:.4f} s with {bytes_.patch}, of which {bytes_.gain:.0%} were expected")
    assert after < (1 - bytes_.gain / 2) * before


def smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)


@contextmanager
def limited_clock(gpu: str) -> Iterator[str]:
    """Lock the GPU's clock or, if the driver does not allow it, lower its power limit; yield the option that undoes it.

    If it allows neither, the test is skipped with the driver's message.
    """
    asked = smi("-i", gpu, "--query-gpu=power.min_limit,power.default_limit", "--format=csv,noheader,nounits").stdout
    least, usual = (str(round(float(each))) for each in asked.split(","))
    ways: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
        (("-lgc", "345,345"), ("-rgc",)),
        (("-pl", least), ("-pl", usual)),
    )
    refused = []
    for hold, undo in ways:
        done = smi("-i", gpu, *hold)
        try:
            if done.returncode == 0:
                yield " ".join(undo)
                return
        finally:
            smi("-i", gpu, *undo)
        refused.append(f"{' '.join(hold)}: {(done.stdout + done.stderr).strip()}")
    pytest.skip("; ".join(refused))


def test_a_gpu_limited_by_a_setting_is_found_with_the_command_that_undoes_it(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="GPUs are sampled with the extra `metrics`")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    recipe = recipe_of(*WORDY, "train.global_batch=4", "plan.grad_accum=1", "train.steps=50")
    with limited_clock(uuid) as undo:
        run = train(recipe, tmp_path)
        found = findings(run)["F069"]
        commands = re.findall(r"`([^`]+)`", found.fix)
        assert f"nvidia-smi -i {uuid} {undo}" in commands
        assert smi(*commands[0].split()[1:]).returncode == 0  # the command of the fix
    assert found.culprit == f"GPU 0 of {platform.node()}"
    assert found.evidence["clock"] < 0.7
    assert found.gain is not None
    assert found.gain > 0.3

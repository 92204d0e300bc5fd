"""The doctor on a GPU that is full, in pieces, busy with bytes or slowed down, each of them for real.

One server has torch imported and forks the ranks out of itself, as a run's fork server does: the import is paid for once.
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
from trimaran.doctor.diagnose import diagnose
from trimaran.doctor.evidence import read_evidence
from trimaran.doctor.predicted_gain import patched
from trimaran.doctor.step_breakdown import StepBreakdown, measure
from trimaran.hardware import parse_cluster
from trimaran.models import outline_if_told, spec_of
from trimaran.nets.decoder import DecoderLayer
from trimaran.planner import choose
from trimaran.run import RunDirectory, create_run, open_run
from trimaran.telemetry.sampler import Sampler
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

pytestmark = pytest.mark.gpu

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
# Two layers under a head with 128,256 words, whose logits are written and read in full.
WORDY = (
    "model.preset=llama-3.2-1b",
    "model.shape={layers: 2}",
    "data.seq_len=2048",
    "plan.micro_batch=4",
    "plan.precision=bf16",
    "plan.compile=false",
    "plan.loss=logits",
)


class Crowd:
    """Somebody who takes all of the device but a little, and then a larger buffer in every step.

    The last buffer is too small for the next one, and beside it there is no room: the allocator has to give back what
    it keeps, and ask again. What it may keep is never less than what the step needs, so memory does not run out.
    """

    AT = 6  # of its calls: by then a step has taken what it takes
    LEFT, FIRST, MORE = 900 * MIB, 500 * MIB, 8 * MIB

    def __init__(self) -> None:
        self._layer: nn.Module | None = None
        self._held: Tensor | None = None
        self._calls = 0

    def enter(self, layer: nn.Module, device: torch.device) -> None:
        """Come in before a layer computes; what is done is done once a step, at the first layer."""
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


def crowd() -> None:
    """Let a crowd into the ranks that this process becomes."""
    forward, connection = DecoderLayer.forward, Crowd()

    def crowded(self: DecoderLayer, stream: Tensor, *rest: object) -> object:
        connection.enter(self, stream.device)
        return forward(self, stream, *rest)  # type: ignore[arg-type]

    DecoderLayer.forward = crowded  # type: ignore[assignment,method-assign]


def crowd_in_segments_that_grow() -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    crowd()


def sail(path: str, plant: Callable[[], None] | None) -> None:
    """Be the only rank of a run."""
    if plant is not None:
        plant()
    place = read_rank_info(os.environ | {"RANK": "0", "WORLD_SIZE": "1"})
    sys.exit(run_worker(open_run(Path(path)), place, cache=Path(path).parent / "cache"))


@contextmanager
def sampled(run: RunDirectory) -> Iterator[None]:
    """Write samples of this machine into the run, as its sidecar would."""
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
    """Return a recipe for one device of this machine's kind."""
    name = parse_cluster("auto").device.name
    return parse_recipe("", name="test", overrides=[*SHORT, f"cluster=1x{name}", *settings])


def train(recipe: Recipe, folder: Path, plant: Callable[[], None] | None = None) -> RunDirectory:
    """Train the recipe for real, in a rank out of the server, beside a sampler."""
    SERVER.set_forkserver_preload([__name__, "torch._dynamo"])
    plan = choose(
        recipe, spec_of(recipe.model), parse_cluster(recipe.cluster), outline_if_told(recipe.model, recipe.data)
    )
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", recipe, plan)
    rank = SERVER.Process(target=sail, args=(str(run.path), plant))
    with sampled(run):
        rank.start()
        rank.join(240)
        rank.kill()
        rank.join()
    assert rank.exitcode == 0, run.events(0).read_text()
    return run


def told(run: RunDirectory) -> dict[str, Finding]:
    found = {each.code: each for each in diagnose(read_evidence(run))}
    print(*(f"{each.code} {each.verdict} {each.patch or each.fix}" for each in found.values()), sep="\n")
    return found


def measured(run: RunDirectory) -> StepBreakdown:
    found = measure(read_evidence(run))
    assert found is not None
    return found


def test_memory_that_is_full_and_begged_for_is_told_and_segments_that_grow_need_not_beg(tmp_path: Path) -> None:
    recipe = recipe_of(*SMALL)
    run = train(recipe, tmp_path, crowd)
    found = told(run)
    assert {"F060", "F061"} <= found.keys()
    begs, full = found["F060"], found["F061"]
    assert (begs.culprit, full.culprit) == ("allocator of rank 0", "the device of rank 0")
    assert begs.evidence["retries"] >= 10
    assert full.evidence["used"] > 0.95 * full.evidence["total"]
    for each in (begs, full):
        assert each.patch
        assert "instead of" in each.expected_effect
        assert patched(recipe, each.patch).plan != recipe.plan
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in begs.fix
    mended = train(recipe, tmp_path, crowd_in_segments_that_grow)
    assert "F060" not in told(mended)
    assert measured(mended).step < measured(run).step


def test_a_device_that_another_process_fills_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="GPUs are sampled with the extra `metrics`")
    recipe = recipe_of(*SMALL, "train.steps=100")
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 5000 * MIB, dtype=torch.uint8, device="cuda")  # by the process of this test
    try:
        found = told(train(recipe, tmp_path))
    finally:
        del held
        torch.cuda.empty_cache()
    assert found["F061"].culprit == "the device of rank 0"
    assert found["F061"].evidence["others"] > 0.8 * found["F061"].evidence["total"]
    assert found["F061"].patch
    assert "who else is on the device" in found["F061"].fix


def test_bytes_that_take_longer_than_products_are_told_and_the_patch_moves_fewer(tmp_path: Path) -> None:
    recipe = recipe_of(*WORDY, "train.global_batch=16", "plan.grad_accum=4", "train.steps=25")
    slow = train(recipe, tmp_path)
    found = told(slow)
    assert "F069" not in found  # busy, at its full clock
    bytes_ = found["F004"]
    assert bytes_.culprit == "memory bandwidth"
    assert bytes_.patch
    assert bytes_.gain is not None
    fast = train(patched(recipe, bytes_.patch), tmp_path)
    before, after = measured(slow).step, measured(fast).step
    print(f"{before:.4f} s a step, {after:.4f} s with {bytes_.patch}, of which {bytes_.gain:.0%} were expected")
    assert after < (1 - bytes_.gain / 2) * before


def smi(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60)


@contextmanager
def held_back(gpu: str) -> Iterator[str]:
    """Lock the GPU's clock or, where the driver does not let us, lower its power limit; lend the option that undoes it.

    Where it lets us do neither, the test is skipped with the driver's words.
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


def test_a_gpu_that_a_setting_slows_down_is_told_with_the_command_that_undoes_it(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="GPUs are sampled with the extra `metrics`")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    recipe = recipe_of(*WORDY, "train.global_batch=4", "plan.grad_accum=1", "train.steps=50")
    with held_back(uuid) as undo:
        run = train(recipe, tmp_path)
        found = told(run)["F069"]
        commands = re.findall(r"`([^`]+)`", found.fix)
        assert f"nvidia-smi -i {uuid} {undo}" in commands
        assert smi(*commands[0].split()[1:]).returncode == 0  # the fix, as it was told
    assert found.culprit == f"GPU 0 of {platform.node()}"
    assert found.evidence["clock"] < 0.7
    assert found.gain is not None
    assert found.gain > 0.3

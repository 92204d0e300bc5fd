"""One rank of a plan, trained for a few steps with the trainer's own parts, and measured.

What is measured: the peak of the rank's tensors, and the time of its steps by phase. The time of a step is everything
from its batch to its update, but not the wait for data. With the process group of a rehearsal it holds no
communication; the kernels that write the results of gathers are in it, and overlap with compute as those of NCCL do.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType, _ProfilerEvent  # single allocations: private in torch
from torch.profiler import ProfilerActivity, profile

from trimaran.core import DEVICE_TRAITS, Plan, Recipe
from trimaran.core.plan import DATA_AXES
from trimaran.data import Loader, share_of
from trimaran.models import spec_of, stage_ranges
from trimaran.nets import attach_adapter, network_of
from trimaran.parallel import RankMesh, build_loss_scale, freeze_towers, learning_rate
from trimaran.parallel.axes import pp
from trimaran.parallel.axes.pp import StageFacts, TimedStage, facts_of_all_stages
from trimaran.planner import MeasuredRank
from trimaran.train.fake_ranks import fake_rank
from trimaran.train.features.table import features_of
from trimaran.train.foreign_networks import hf_stage_ranges, open_hf_network
from trimaran.train.health.guard import Guard
from trimaran.train.inputs.training_data import build_loader, load_training_data
from trimaran.train.metrics.step_clock import ReadSeconds, StepClock, cuda_seconds
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.rank_networks import build_networks
from trimaran.train.rehearsal.rehearsal_group import BACKEND, register_backend
from trimaran.train.steppers import step_totals
from trimaran.train.steppers.engine import build_stepper


@contextmanager
def without_other_ranks(recipe: Recipe, plan: Plan, ranks: RankMesh) -> Iterator[None]:
    """Answer for the other ranks inside the block, where the trainer would ask them."""
    with ExitStack() as stack:
        ranks.__dict__["counts_samples"] = True  # the tokens of a batch are counted, whichever rank counts them
        stack.enter_context(_replaced(step_totals, "num_sharing", lambda _: 1))  # nobody to compare the batch with
        if plan.mesh.pp > 1:
            facts = stage_facts_of(recipe, plan)
            stack.enter_context(_replaced(pp, "gather_stage_facts", lambda *_: facts))
        yield


def stage_facts_of(recipe: Recipe, plan: Plan) -> StageFacts:
    """Return the facts of all stages, from their networks on the meta device; adapters need the whole network."""
    spec, whole = spec_of(recipe.model), None
    if spec is None:
        from trimaran.nets.hf.hf_stages import cut_stage, pipeline_layers  # noqa: PLC0415  it imports transformers

        whole, _ = open_hf_network(recipe.model, recipe.train.seed, without_weights=True)
        layers = pipeline_layers(whole)
        networks = [cut_stage(whole, layers, part) for part in hf_stage_ranges(recipe, plan, layers.count)]
    else:
        with torch.device("meta"):
            whole = network_of(spec) if recipe.model.adapter else None
            networks = [network_of(spec, each) for each in stage_ranges(spec, plan, seq_len=recipe.data.seq_len)]
    for network in networks:
        freeze_towers(network, recipe.model.freeze)
        if recipe.model.adapter is not None:
            attach_adapter(network, recipe.model.adapter, whole)
    return facts_of_all_stages(networks)


@contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


METHODS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight_grad",
}


class TimedPass(NamedTuple):
    """A pass as a rank ran it: its kind as in `simulate.pipeline_order`, and functions of when it began and ended."""

    kind: str
    stage: int
    micro_batch: int
    read_seconds: Callable[[], float]


class PassRecorder:
    """The passes of the step that is running, or of the last one. On a GPU read their times when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.passes: list[TimedPass] = []
        self._on_gpu = DEVICE_TRAITS[device.type].runs_async

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, stage: int, micro_batch: int, start: Any) -> None:
        end = self.mark()
        read = (lambda: cuda_seconds(start, end)) if self._on_gpu else (lambda: end - start)
        self.passes.append(TimedPass(kind, stage, micro_batch, read))

    def mean_seconds(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, list[float]]] = {}
        for each in self.passes:
            found.setdefault(each.stage, {}).setdefault(each.kind, []).append(each.read_seconds())
        return {stage: {kind: fmean(each) for kind, each in kinds.items()} for stage, kinds in found.items()}


@contextmanager
def recorded_passes(device: torch.device) -> Iterator[PassRecorder]:
    recorder = PassRecorder(device)
    originals = {name: getattr(TimedStage, name) for name in METHODS}
    for name, original in originals.items():
        setattr(TimedStage, name, _recording(original, recorder))
    try:
        yield recorder
    finally:
        for name, original in originals.items():
            setattr(TimedStage, name, original)


def _recording(original: Callable[..., Any], recorder: PassRecorder) -> Callable[..., Any]:
    @wraps(original)
    def recording(stage: TimedStage, number: int, *args: Any, **kwargs: Any) -> Any:
        start = recorder.mark()
        result = original(stage, number, *args, **kwargs)
        kind = METHODS[original.__name__] if kwargs.get("full_backward", True) else "input_grad"
        recorder.add(kind, stage.stage_index, number, start)
        return result

    return recording


@dataclass(slots=True)
class TensorPeak:
    """Bytes of a rank's tensors at their peak, at the peak of the steps after the warm-up, and those reserved for them.

    On a CPU, tensors that other threads allocate (loaders) are not counted, and nothing is reserved.
    """

    whole: int = 0
    steps: int = 0
    reserved: int = 0
    first_step_ns: int = 0  # where the steps of the peak `steps` begin, on the clock of the profiler


@contextmanager
def measured_tensors() -> Iterator[TensorPeak]:
    """Measure the tensors that this thread, and the backward that it starts, allocate on the CPU inside the block.

    A process can do so once: later records of torch's profiler may be empty.
    """
    peak = TensorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    waiting: list[_ProfilerEvent] = [*results.experimental_event_tree()]
    allocations: list[tuple[int, int, int]] = []  # time, address, and size: below 0 for a release
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    live, sizes = 0, dict[int, int]()
    for when, address, change in sorted(allocations):
        if change > 0:
            # What another thread freed, such as one of gloo's, is not recorded; its memory is used again.
            live += change - sizes.get(address, 0)
            sizes[address] = change
        else:
            live -= sizes.pop(address, 0)
        peak.whole = max(peak.whole, live)
        if when >= peak.first_step_ns:
            peak.steps = max(peak.steps, live)


# Steps before the measured ones: the first creates compiled code and the optimizer's states. CUDA graphs are captured
# in the fourth.
WARMUP_STEPS, CAPTURE_STEPS = 2, 5
MEMORY_STEPS = 2  # on a CPU, where memory is recorded in steps of their own: the record makes them slower
PHASES = {"forward": "forward", "backward": "backward", "comm": "other", "optimizer": "optimizer"}


def rehearse_rank(
    recipe: Recipe, plan: Plan, rank: int, *, steps: int, cache: Path, device: torch.device
) -> MeasuredRank:
    """Train `steps` steps of one rank of the plan, alone, and return what it needed."""
    register_backend()
    if DEVICE_TRAITS[device.type].has_own_memory:
        torch.cuda.init()  # before the mesh, which would choose a device by the rank's number
        torch.cuda.set_device(device)
    with fake_rank(plan, rank, device, backend=BACKEND) as fake, without_other_ranks(recipe, plan, fake.ranks):
        return measure_rank(recipe, plan, fake.info, fake.ranks, steps=steps, cache=cache)


def measure_rank(
    recipe: Recipe, plan: Plan, info: RankInfo, ranks: RankMesh, *, steps: int, cache: Path
) -> MeasuredRank:
    """Train `steps` steps after a warm-up and return what this rank needed. It may be one of a real process group."""
    began, on_gpu = time.monotonic(), DEVICE_TRAITS[info.device.type].has_own_memory
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    warmup = CAPTURE_STEPS if on_gpu and plan.captures_steps else WARMUP_STEPS
    with ExitStack() as recording, recorded_passes(info.device) as recorder:
        peak = TensorPeak() if on_gpu else recording.enter_context(measured_tensors())
        run = _RankRun(recipe, plan, info, ranks, recorder)
        loader = run.build(cache, warmup + MEMORY_STEPS + steps)
        build_seconds = time.monotonic() - began
        with loader:
            run.train(loader, warmup)
            if on_gpu:
                peak.whole = torch.cuda.max_memory_allocated(info.device)
                peak.reserved = torch.cuda.max_memory_reserved(info.device)
                torch.cuda.reset_peak_memory_stats(info.device)
            else:
                peak.first_step_ns = time.time_ns()
                run.train(loader, MEMORY_STEPS)
                recording.close()
            measured = run.train(loader, steps)
        if on_gpu:
            peak.steps = torch.cuda.max_memory_allocated(info.device)
        return MeasuredRank(
            peak_bytes=max(peak.whole, peak.steps),
            steady_peak_bytes=peak.steps,
            reserved_bytes=max(peak.reserved, torch.cuda.max_memory_reserved(info.device)) if on_gpu else 0,
            step_seconds=median(sum(each.values()) for each in measured),
            all_seconds=[sum(each.values()) for each in measured],
            phases={name: median(each[name] for each in measured) for name in PHASES.values()},
            stages=recorder.mean_seconds(),
            passes=[each[:3] for each in recorder.passes],
            losses=run.losses,
            num_refused=run.num_refused,
            build_seconds=build_seconds,
        )


class _RankRun:
    """The parts of a rank's steps, as the worker builds them, and the loop of the trainer without its records."""

    def __init__(self, recipe: Recipe, plan: Plan, info: RankInfo, ranks: RankMesh, recorder: PassRecorder) -> None:
        self._recipe, self._plan, self._info, self._ranks, self._recorder = recipe, plan, info, ranks, recorder
        # Nobody is waited for: what stands for a collective inside a layer is part of the layer.
        self._clock = StepClock(info.device, timed_axes=DATA_AXES)
        self.losses: list[float] = []
        self.num_refused = 0

    def build(self, cache: Path, steps: int) -> Loader:
        """Build networks, data and stepper, and return the loader of the first `steps` steps."""
        recipe, plan, ranks = self._recipe, self._plan, self._ranks
        networks = build_networks(recipe, plan, self._info, ranks)
        data = load_training_data(recipe, networks[0], share_of(plan, ranks.data_rank), cache=cache)
        guard = Guard(recipe.faults, loss_scale=build_loss_scale(plan, recipe.train))
        self._stepper = build_stepper(networks, recipe.train, plan, ranks, self._clock, guard, data.objective,
                                      groups_every=recipe.telemetry.details_every,
                                      features=features_of(plan, recipe))  # fmt: skip
        # In the first steps of a run checksums of all its state are computed, later of so much as takes 1 % of a step:
        # none are in a rehearsal, so that its steps are like later ones.
        self._stepper.set_training(True)
        longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})
        return build_loader(longer, self._info, lambda: data.training(frozenset()), 0)

    def train(self, loader: Loader, steps: int) -> list[dict[str, float]]:
        seconds: list[dict[str, float]] = []
        pending: tuple[ReadSeconds, Callable[[], object], torch.Tensor] | None = None  # the device may still compute it
        self._clock.restart()
        for _ in range(steps):
            batch = next(loader).to(self._info.device)
            self._clock.lap("data")
            self._recorder.passes.clear()
            self._ranks.reseed(self._recipe.train.seed, batch.step)
            numbers = self._stepper.step(batch)
            norm, refused = self._stepper.update(learning_rate(batch.step, self._recipe.train))
            numbers = torch.cat([numbers, norm.reshape(1), refused.reshape(1)]).to("cpu", non_blocking=True)
            self._clock.lap("optimizer")
            if pending is not None:  # as the trainer does it: one step later, so that the device does not wait
                seconds.append(self._read(*pending))
            pending = self._clock.end_step(), self._stepper.details(), numbers
        assert pending is not None, "at least one step is trained"
        seconds.append(self._read(*pending))
        return [{new: each.get(old, 0.0) for old, new in PHASES.items()} for each in seconds]

    def _read(
        self, read_seconds: ReadSeconds, read_details: Callable[[], object], numbers: torch.Tensor
    ) -> dict[str, float]:
        """Return the seconds of a step by phase, and note its loss. Waits until the device has finished the step."""
        seconds = read_seconds().phases
        read_details()
        self.losses.append(float(numbers[0]))
        self.num_refused += int(numbers[-1] > 0)
        return seconds

"""One rank of a plan, trained for a few steps with the trainer's own parts, and measured.

What is measured: the peak of the rank's tensors, and the time of its steps by phase. The time of a step is everything
from its batch to its update, but not the wait for data. With the process group of a rehearsal it holds no
communication; the kernels that write the results of gathers are in it, and overlap with compute as those of NCCL do.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from trimaran.core import Plan, Recipe
from trimaran.core.plan import DATA_AXES
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.data.feed import share_of
from trimaran.data.loader import Loader
from trimaran.parallel import RankMesh
from trimaran.parallel.optimizer.loss_scale import build_loss_scale
from trimaran.parallel.optimizer.schedule import learning_rate
from trimaran.planner.measure.rank_task import MeasuredRank
from trimaran.train.fake_ranks import fake_rank
from trimaran.train.features.table import features_of
from trimaran.train.health.guard import Guard
from trimaran.train.inputs.training_data import build_loader, load_training_data
from trimaran.train.metrics.step_clock import ReadSeconds, StepClock
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.rank_networks import build_networks
from trimaran.train.rehearsal.absent_ranks import without_other_ranks
from trimaran.train.rehearsal.pass_recorder import PassRecorder, recorded_passes
from trimaran.train.rehearsal.rehearsal_group import BACKEND, register_backend
from trimaran.train.rehearsal.tensor_peak import TensorPeak, measured_tensors
from trimaran.train.steppers.engine import build_stepper

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
            _begin_steady_steps(peak, info.device)
            if not on_gpu:
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
            passes=recorder.order,
            losses=run.losses,
            num_refused=run.num_refused,
            build_seconds=build_seconds,
        )


def _begin_steady_steps(peak: TensorPeak, device: torch.device) -> None:
    if DEVICE_TRAITS[device.type].has_own_memory:
        peak.whole, peak.reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak.mark_steps(time.time_ns())


class PendingNumbers(NamedTuple):
    """A step whose numbers are not read yet: the device may still compute them."""

    read_seconds: ReadSeconds
    read_details: Callable[[], object]
    numbers: torch.Tensor


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
        """Train so many steps and return the seconds of each by phase."""
        seconds: list[dict[str, float]] = []
        pending: PendingNumbers | None = None
        self._clock.restart()
        for _ in range(steps):
            batch = next(loader).to(self._info.device)
            self._clock.lap("data")
            self._recorder.restart()
            self._ranks.reseed(self._recipe.train.seed, batch.step)
            numbers = self._stepper.step(batch)
            norm, refused = self._stepper.update(learning_rate(batch.step, self._recipe.train))
            numbers = torch.cat([numbers, norm.reshape(1), refused.reshape(1)]).to("cpu", non_blocking=True)
            self._clock.lap("optimizer")
            if pending is not None:  # as the trainer does it: one step later, so that the device does not wait
                seconds.append(self._read(pending))
            pending = PendingNumbers(self._clock.end_step(), self._stepper.details(), numbers)
        assert pending is not None, "at least one step is trained"
        seconds.append(self._read(pending))
        return [{new: each.get(old, 0.0) for old, new in PHASES.items()} for each in seconds]

    def _read(self, pending: PendingNumbers) -> dict[str, float]:
        """Return the seconds of a step by phase, and note its loss. Waits until the device has finished the step."""
        seconds = pending.read_seconds().phases
        pending.read_details()
        self.losses.append(float(pending.numbers[0]))
        self.num_refused += int(pending.numbers[-1] > 0)
        return seconds

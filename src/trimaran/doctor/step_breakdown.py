"""Splits the time of a typical step into compute, data, communication, stragglers, bubble and checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median
from typing import Any

from trimaran.doctor.evidence import Evidence, Line
from trimaran.runs import SteadyMarks, StepPlace

MIN_STEPS = 10  # for a verdict
BACKWARD_OVER_FORWARD = 2.0  # without a prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds of a step as rank 0 measured them. The parts add up to `step`.

    `data` and `checkpoint`, which are occasional, are means over all warm steps; the others are medians of steady ones.
    """

    steps: int
    step: float
    step_seconds: float
    data: float
    comm: float  # exposed communication
    straggler: float  # the wait for the slowest rank
    bubble: float  # the pipeline bubble
    checkpoint: float
    compute: float
    # the waits of each measured axis, with its stragglers and bubble: their sum is the phase `comm`
    axes: Mapping[str, float] = field(default_factory=dict)

    def fraction(self, part: str) -> float:
        return getattr(self, part) / self.step if self.step else 0.0

    @property
    def fractions(self) -> dict[str, float]:
        """The parts as fractions of a step, for evidence."""
        parts = ("compute", "data", "comm", "straggler", "bubble", "checkpoint")
        return {part: round(self.fraction(part), 4) for part in parts if self.fraction(part) > 0}


@lru_cache(maxsize=1)  # most rules ask for it, with the same evidence
def step_breakdown(evidence: Evidence) -> StepBreakdown | None:
    """Return the breakdown of a typical step; None with fewer than `MIN_STEPS` steps."""
    warm, steps = warm_steps(evidence), steady_steps(evidence)
    if len(steps) < MIN_STEPS:
        return None
    data, checkpoint = fmean(map(data_wait_seconds, warm)), fmean(phase_seconds(each, "checkpoint") for each in warm)
    rest = median(each["step_seconds"] - data_wait_seconds(each) - phase_seconds(each, "checkpoint") for each in steps)
    bubble = median(get_number(each, "bubble", "measured") or 0.0 for each in steps) * rest
    straggler = max(
        median(get_number(each, "waits", "straggler") or 0.0 for each in steps), straggler_seconds(evidence, steps)
    )
    waited = _comm(evidence, steps)
    straggler = min(straggler, waited)
    comm = max(0.0, waited - straggler - bubble)
    return StepBreakdown(
        steps=len(steps),
        step=rest + data + checkpoint,
        step_seconds=median(each["step_seconds"] - phase_seconds(each, "checkpoint") for each in steps),
        data=data,
        comm=comm,
        straggler=straggler,
        bubble=bubble,
        checkpoint=checkpoint,
        compute=max(0.0, rest - comm - straggler - bubble),
        axes=axis_seconds(steps),
    )


def axis_seconds(steps: Sequence[Line]) -> dict[str, float]:
    """Return the median exposed communication of each axis; without axes of which not all waits are measured."""
    lines = [each["comm_seconds"] for each in steps if isinstance(each.get("comm_seconds"), dict)]
    axes = [axis for axis in (lines[-1] if lines else ()) if all(get_number(each, axis) is not None for each in lines)]
    return {axis: median(get_number(each, axis) or 0.0 for each in lines) for axis in axes}


def straggler_seconds(evidence: Evidence, steps: Sequence[Line]) -> float:
    """Return how much longer the slowest rank computes than the others; 0 with a pipeline, whose stages differ."""
    if evidence.plan.mesh.pp > 1:
        return 0.0
    others = "median" if evidence.plan.mesh.world_size > 2 else "min"
    late = [
        most - usual
        for step in steps
        if (most := get_number(step, "ranks", "forward_seconds", "max")) is not None
        and (usual := get_number(step, "ranks", "forward_seconds", others)) is not None
    ]
    return median(late) if late else 0.0


@lru_cache(maxsize=1)
def warm_steps(evidence: Evidence) -> tuple[Line, ...]:
    """Return the steps after the warm-up, for what is occasional: checkpoints, waits for data, recompilations."""
    marks = SteadyMarks(evidence.events)
    warm = [each for each in evidence.steps if marks.is_warm(each["step"])]
    busy = [each["step_seconds"] - phase_seconds(each, "data") - phase_seconds(each, "checkpoint") for each in warm]
    return tuple(each for each, seconds in zip(warm, busy, strict=True) if seconds > 0)


@lru_cache(maxsize=1)
def steady_steps(evidence: Evidence) -> tuple[Line, ...]:
    """Return the steady steps, see `runs/read/steady_steps.py`."""
    return tuple(SteadyMarks(evidence.events).steady(warm_steps(evidence), _place))


def _place(step: Line) -> StepPlace:
    return StepPlace(step["step"], get_number(step, "time") or 0.0, step["step_seconds"])


def data_wait_seconds(step: Line) -> float:
    """Return how long a step waited for its batch, if known; the phase `data` also has the copy to the device."""
    return get_number(step, "loader", "waited") or 0.0


def phase_seconds(step: Line, name: str) -> float:
    return get_number(step, "phases", name) or 0.0


def get_number(line: Line, *path: str) -> float | None:
    """Return the number at `path` in a line, or None."""
    here: Any = line
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return float(here) if isinstance(here, int | float) and not isinstance(here, bool) else None


def get_numbers(lines: Iterable[Line], *path: str) -> list[float]:
    """Return the numbers at `path` of the lines that have one."""
    return [number for each in lines if (number := get_number(each, *path)) is not None]


def get_timed_numbers(lines: Iterable[Line], *path: str) -> list[tuple[float, float]]:
    """Return (time, number at `path`) of the lines that have both."""
    pairs = ((get_number(each, "time"), get_number(each, *path)) for each in lines)
    return [(at, number) for at, number in pairs if at is not None and number is not None]


def _comm(evidence: Evidence, steps: Sequence[Line]) -> float:
    """Return the seconds of a step in which a rank waited in collectives without computing."""
    # This is what the loop measures. If it could not measure all waits inside layers, the time by which backward
    # exceeds its expected multiple of forward counts as well.
    mesh = evidence.plan.mesh
    if mesh.world_size == 1:
        return 0.0
    comm = median(phase_seconds(each, "comm") for each in steps)
    measured = axis_seconds(steps)
    inside = [axis for axis in ("tp", "cp", "ep", "pp") if getattr(mesh, axis) > 1]
    is_hidden = any(axis not in measured for axis in inside) or not evidence.plan.engine_traits.times_collectives
    if not is_hidden and any("waits" in each for each in steps):
        return comm
    time = evidence.plan.prediction.time if evidence.plan.prediction else {}
    ratio = time["backward"] / time["forward"] if time.get("forward") else BACKWARD_OVER_FORWARD
    excess = median(phase_seconds(each, "backward") - ratio * phase_seconds(each, "forward") for each in steps)
    return comm + max(0.0, excess)

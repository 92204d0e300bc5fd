"""Where the time of a run's steps went, in seconds of a usual step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import Any

from trimaran.doctor.evidence import Evidence, Line

WARM_STEPS = 5  # after each start: compiling, first allocations, caches that fill
FEWEST = 10  # steps that a verdict needs
USUAL_BACKWARD = 2.0  # times a forward, where no prediction says


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds of a step as rank 0 saw it. The parts add up to `step`.

    What comes now and then, `data` and `checkpoint`, is a mean; the rest is what a step in the middle takes. `comm` is
    what travelled while nothing was computed, `straggler` what was waited for the slowest rank, `bubble` what a
    pipeline waited while it filled and drained.
    """

    steps: int
    step: float
    data: float
    comm: float
    straggler: float
    bubble: float
    checkpoint: float
    compute: float

    def share(self, part: str) -> float:
        return getattr(self, part) / self.step if self.step else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of a step, for evidence."""
        parts = ("compute", "data", "comm", "straggler", "bubble", "checkpoint")
        return {part: round(self.share(part), 4) for part in parts if self.share(part) > 0}


@lru_cache(maxsize=1)  # most rules ask, of the same evidence
def measure(evidence: Evidence) -> StepBreakdown | None:
    """Return where the time went; None while there are too few steps to tell."""
    steps = settled(evidence)
    if len(steps) < FEWEST:
        return None
    data, checkpoint = fmean(map(data_wait, steps)), fmean(phase(each, "checkpoint") for each in steps)
    rest = median(each["step_seconds"] - data_wait(each) - phase(each, "checkpoint") for each in steps)
    bubble = median(number(each, "bubble", "measured") or 0.0 for each in steps) * rest
    straggler = max(median(number(each, "waits", "straggler") or 0.0 for each in steps), late_seconds(evidence, steps))
    waited = _comm(evidence, steps)  # for whatever reason
    straggler = min(straggler, waited)
    comm = max(0.0, waited - straggler - bubble)
    return StepBreakdown(
        steps=len(steps),
        step=rest + data + checkpoint,
        data=data,
        comm=comm,
        straggler=straggler,
        bubble=bubble,
        checkpoint=checkpoint,
        compute=max(0.0, rest - comm - straggler - bubble),
    )


def late_seconds(evidence: Evidence, steps: Sequence[Line]) -> float:
    """Return how much longer than the others the slowest rank computes before they wait for it, in a usual step.

    Stages of a pipeline have different work, so there nobody is late.
    """
    if evidence.plan.mesh.pp > 1:
        return 0.0
    others = "median" if evidence.plan.mesh.world_size > 2 else "min"
    late = [
        most - usual
        for step in steps
        if (most := number(step, "ranks", "forward_seconds", "max")) is not None
        and (usual := number(step, "ranks", "forward_seconds", others)) is not None
    ]
    return median(late) if late else 0.0


def settled(evidence: Evidence) -> list[Line]:
    """Return the steps that count: not those right after a start, and none that took nothing."""
    starts = {int(each.get("step") or 0) for each in evidence.of_kind("started")} or {1}
    cold = {start + number for start in starts for number in range(WARM_STEPS)}
    return [each for each in evidence.steps if each["step"] not in cold and each["step_seconds"] > 0]


def data_wait(step: Line) -> float:
    """Return how long a step waited for its batch. The metrics tell it where it was worth telling.

    The phase `data` is no measure of it: it has the copy to the device and the host's bookkeeping in it as well.
    """
    return number(step, "loader", "waited") or 0.0


def phase(step: Line, name: str) -> float:
    return number(step, "phases", name) or 0.0


def number(line: Line, *path: str) -> float | None:
    """Return the number at `path` in a line, or None where there is none."""
    here: Any = line
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return float(here) if isinstance(here, int | float) and not isinstance(here, bool) else None


def _comm(evidence: Evidence, steps: Sequence[Line]) -> float:
    """Return the seconds of a step in which a rank waited in collectives and computed nothing.

    That is what the loop itself waits for. Where it cannot tell that in a backward, what is longer there beside the
    forward than it should be counts as well: there gradients travel.
    """
    mesh = evidence.plan.mesh
    if mesh.world_size == 1:
        return 0.0
    told = median(phase(each, "comm") for each in steps)
    inside = mesh.tp * mesh.cp * mesh.ep * mesh.pp > 1 or evidence.plan.engine != "torch"
    if not inside and any("waits" in each for each in steps):
        return told
    time = evidence.plan.prediction.time if evidence.plan.prediction else {}
    usual = time["backward"] / time["forward"] if time.get("forward") else USUAL_BACKWARD
    late = median(phase(each, "backward") - usual * phase(each, "forward") for each in steps)
    return told + max(0.0, late)

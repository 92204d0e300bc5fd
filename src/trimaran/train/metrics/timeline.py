"""The events of a step as values, and the seconds that they add up to."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from trimaran.core import Phase
from trimaran.core.plan import WORLD


class PhaseEvent(NamedTuple):
    """A lap of a step, or a span inside a lap or inside another span. `start` and `end` are in seconds.

    phase: None for a discarded lap, and for a span that raised an error.
    axis: of the mesh, for which a phase `comm` communicates.
    depth: 0 for a lap, 1 for a span inside a lap, 2 for a span inside that span, and so on.
    stage: of the pipeline, for forward and backward of a pipeline stage.
    """

    phase: Phase | None
    start: float
    end: float
    axis: str = WORLD
    depth: int = 0
    stage: int | None = None


class StepSeconds(NamedTuple):
    """The seconds of a step by phase, and those of the phase `comm` by axis.

    `stages` has the seconds of forward and backward by pipeline stage, with the waits inside them.
    """

    phases: dict[str, float]
    comm: dict[str, float]
    stages: dict[int, float]


def attribute(events: Iterable[PhaseEvent]) -> StepSeconds:
    """Return the seconds of these events, which are in the order of their ends.

    An event counts without the spans inside it, so that laps add up to the step. A discarded lap does not count. The
    time of a span that raised counts for the event around it.
    """
    phases: dict[str, float] = defaultdict(float)
    comm: dict[str, float] = defaultdict(float)
    stages: dict[int, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)  # at each depth, the seconds of spans whose outer event is still open
    previous = 0
    for phase, start, end, axis, depth, stage in events:
        spans = inside.pop(depth + 1, 0.0) if depth < previous else 0.0  # the last one inside has just ended
        previous = depth
        if phase is None:
            inside[depth] += spans
            continue
        seconds = end - start
        inside[depth] += seconds
        phases[phase] += seconds - spans
        if phase == "comm":
            comm[axis] += seconds - spans
        if stage is not None and depth == 1:
            stages[stage] += seconds
    return StepSeconds(dict(phases), dict(comm), dict(stages))

"""A better cut of a running pipeline into stages, from the measured time of each stage.

The cost model says how layers of different kinds compare: those of a vision tower and of the language model, the head.
The measured stages correct that, kind by kind as far as they can tell kinds apart. What remains is the place: a stage
whose device is slower than the others. Its layers take that much longer there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from trimaran.core import Plan
from trimaran.models import Outline, stages_of_rank

KIND_UNCERTAINTY = 0.5  # relative, of the cost model's ratio between kinds of layers
END_UNCERTAINTY = 1.0  # the same of the embedding, which is no matmul, and of the head, whose loss is none
EMBEDDING_LAYERS = 0.25  # mean layers that an embedding and its gradient are assumed to take
STAGE_UNCERTAINTY = 0.05  # of a mean stage: the time that a stage takes for other reasons than its layers
MIN_FACTOR = 0.05  # of a kind of layer, on what the cost model says
MAX_PLACE_FACTOR = 3.0  # by which a stage may be slower or faster than its layers explain


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStages:
    """The layers of each stage, and the seconds of its forward and backward for one micro-batch."""

    layers: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A cut into stages, with the seconds of one micro-batch that each should take, and those of a whole step."""

    layers: tuple[int, ...]
    seconds: tuple[float, ...]
    step_seconds: float


def present_cut(measured: MeasuredStages, plan: Plan) -> StageCut:
    """Return the measured cut."""
    return StageCut(
        layers=measured.layers, seconds=measured.seconds, step_seconds=_step_seconds(measured.seconds, plan)
    )


def balanced_cut(measured: MeasuredStages, plan: Plan, outline: Outline, *, seq_len: int) -> StageCut | None:
    """Return the cut with the shortest step; None if the stages are not those of this model."""
    costs = _LayerCosts(outline, seq_len)
    is_measured = min(measured.layers) >= 1 and min(measured.seconds) > 0
    if sum(measured.layers) != costs.num_layers or not is_measured or min(cost for _, cost in costs.layers) <= 0:
        return None
    until, places = _fit(measured, costs)
    # For each number of placed layers: the longest stage, the sum of squares, and the cut so far, which is the one that
    # makes the longest stage shortest. Ties go to the most even cut.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage, place in enumerate(places):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (longest, squares, cut) in best.items():
            for stop in range(start + 1, costs.num_layers - (len(places) - stage - 1) + 1):
                seconds = place * (until[stop] - until[start])
                found = max(longest, seconds), squares + seconds**2, (*cut, stop - start)
                if stop not in longer or found[:2] < longer[stop][:2]:
                    longer[stop] = found
        best = longer
    layers = best[costs.num_layers][2]
    stages = tuple(
        place * (until[part.stop] - until[part.start]) for place, part in zip(places, _ranges(layers), strict=True)
    )
    return StageCut(layers=layers, seconds=stages, step_seconds=_step_seconds(stages, plan))


class _LayerCosts:
    """The FLOPs of each layer and of both ends, and their kinds: embedding and head are the last ones."""

    def __init__(self, outline: Outline, seq_len: int) -> None:
        kinds: list[object] = []
        self.layers: list[tuple[int, float]] = []  # kind, FLOPs with backward
        for tower in outline.towers:
            for block, count in tower.runs:
                if (tower.name, block) not in kinds:
                    kinds.append((tower.name, block))
                cost = float(outline.block_flops(tower, block, seq_len))
                self.layers += [(kinds.index((tower.name, block)), cost)] * count
        self.embedding = EMBEDDING_LAYERS * sum(cost for _, cost in self.layers) / len(self.layers)
        self.head, self.num_kinds = float(outline.head_flops(seq_len)), len(kinds) + 2

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def by_kind(self, part: range) -> list[float]:
        """Return the FLOPs of these layers by kind; the first layer has the embedding, the last one the head."""
        total = [0.0] * self.num_kinds
        for number in part:
            kind, cost = self.layers[number]
            total[kind] += cost
        if 0 in part:
            total[-2] += self.embedding
        if self.num_layers - 1 in part:
            total[-1] += self.head
        return total


def _fit(measured: MeasuredStages, costs: _LayerCosts) -> tuple[list[float], list[float]]:
    """Fit one factor for each kind of layer by least squares, near to the ratios of the cost model.

    Return the seconds of all layers before each one, of which the first has the embedding and the last the head, and
    the factor of each stage.
    """
    import numpy as np  # noqa: PLC0415  (takes a tenth of a second)

    rows = [costs.by_kind(part) for part in _ranges(measured.layers)]
    scale = sum(measured.seconds) / sum(map(sum, rows))
    usual = STAGE_UNCERTAINTY * sum(measured.seconds) / len(measured.seconds)
    rows = [[scale * each for each in row] for row in rows]
    deviations = [KIND_UNCERTAINTY] * (costs.num_kinds - 2) + [END_UNCERTAINTY] * 2
    matrix = [[sum(row[i] * row[j] for row in rows) / usual**2 for j in range(costs.num_kinds)]
              for i in range(costs.num_kinds)]  # fmt: skip
    right = [sum(row[i] * seconds for row, seconds in zip(rows, measured.seconds, strict=True)) / usual**2
             for i in range(costs.num_kinds)]  # fmt: skip
    for kind, deviation in enumerate(deviations):
        matrix[kind][kind] += 1 / deviation**2
        right[kind] += 1 / deviation**2
    factors = [max(MIN_FACTOR, float(each)) for each in np.linalg.solve(matrix, right)]
    layers = [scale * factors[kind] * cost for kind, cost in costs.layers]
    layers[0] += scale * factors[-2] * costs.embedding
    layers[-1] += scale * factors[-1] * costs.head
    until = list(accumulate(layers, initial=0.0))
    explained = [until[part.stop] - until[part.start] for part in _ranges(measured.layers)]
    places = [min(max(seconds / each, 1 / MAX_PLACE_FACTOR), MAX_PLACE_FACTOR)
              for seconds, each in zip(measured.seconds, explained, strict=True)]  # fmt: skip
    return until, places


def _step_seconds(stages: Sequence[float], plan: Plan) -> float:
    """Return the time of all micro-batches: the busiest rank works on each, and the pipeline fills and drains once."""
    ranks, rounds = plan.mesh.pp, max(1, len(stages) // plan.mesh.pp)
    busy = [
        math.fsum(stages[stage] for stage in stages_of_rank(plan.pipeline.schedule, ranks, rank, len(stages)))
        for rank in range(ranks)
    ]
    return plan.grad_accum * max(busy) + (sum(busy) - max(busy)) / rounds


def _ranges(layers: Sequence[int]) -> Iterator[range]:
    return (range(start, stop) for start, stop in pairwise(accumulate(layers, initial=0)))

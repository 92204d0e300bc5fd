"""Splits layers into pipeline stages, so that the most expensive stage is as cheap as possible."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from trimaran.core import Plan
from trimaran.models.any_spec import Spec, spec_outline
from trimaran.models.outline import Outline
from trimaran.models.vlm_spec import ImageLimits


def stage_ranges(spec: Spec, plan: Plan, *, seq_len: int) -> tuple[range, ...]:
    """Return the blocks of each stage, in order: as the plan lists them, or split by cost. One without a pipeline."""
    counts = plan.pipeline.stages if plan.mesh.pp > 1 else (spec.num_blocks,)
    counts = counts or split_by_cost(spec, plan.num_stages, seq_len=seq_len)
    assert sum(counts) == spec.num_blocks, "a legal plan's stages hold every layer once"
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def stages_of_rank(schedule: str, pp: int, pp_rank: int, num_stages: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank: round-robin, or for `zero-bubble` in V shape, to the last rank and back."""
    if schedule == "zero-bubble" and num_stages > pp:
        return pp_rank, num_stages - 1 - pp_rank
    return tuple(range(pp_rank, num_stages, pp))


def split_by_cost(spec: Spec, num_stages: int, *, seq_len: int) -> tuple[int, ...]:
    """Return how many blocks of our network each stage gets, so that the most expensive stage is cheapest.

    A vision-language model is assumed to get one image of its own size per sequence.
    """
    return split_outline(spec_outline(spec, ImageLimits()), num_stages, seq_len=seq_len)


@lru_cache(maxsize=1024)  # a search asks again for each plan
def split_outline(outline: Outline, num_stages: int, *, seq_len: int) -> tuple[int, ...]:
    """Return how many blocks each stage gets, so that the most expensive stage is cheapest.

    The cost of a block is its FLOPs, including backward if it has one. The head is added to the last block; an
    embedding is a lookup and free. With more stages than blocks, which some systems allow, the last ones stay empty.
    Layers that predict later tokens stay together with the head.
    """
    together = max(1, outline.main.prediction_layers)
    parts = outline.layers - together + 1
    if num_stages > parts:
        return (1,) * (parts - 1) + (together,) + (0,) * (num_stages - parts)
    costs = [
        int(outline.block_flops(tower, block, seq_len))
        for tower in outline.towers
        for block, count in tower.runs
        for _ in range(count)
    ]
    costs[parts - 1 :] = [sum(costs[parts - 1 :]) + int(outline.head_flops(seq_len))]
    *counts, last = cheapest_split(costs, num_stages)
    return *counts, last + together - 1


def cheapest_split(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return how many of `costs` each stage gets, in order and at least one, so that the largest sum is smallest.

    Ties go to the most even split (least squares), then to fewer blocks in later stages.
    """
    assert 1 <= num_stages <= len(costs), "every stage needs a layer"
    until = list(accumulate(costs, initial=0))
    # The cost of the most expensive stage in the best split: the smallest limit that a greedy fill meets.
    limit, high = max(costs), sum(costs)
    while limit < high:
        middle = (limit + high) // 2
        stages, room = 1, middle
        for cost in costs:
            stages, room = (stages, room - cost) if cost <= room else (stages + 1, middle - cost)
        limit, high = (limit, middle) if stages <= num_stages else (middle + 1, high)
    # For each number of placed layers: the sum of squares so far, and the negated split, so that smaller is better.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, num_stages + 1):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, split) in best.items():
            for stop in range(start + 1, len(costs) - (num_stages - stage) + 1):
                cost = until[stop] - until[start]
                if cost > limit:
                    break
                found = squares + cost * cost, (*split, start - stop)
                longer[stop] = min(longer.get(stop, found), found)
        best = longer
    return tuple(-count for count in best[len(costs)][1])

"""What one rank has of a network that is cut into stages, slices and experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from trimaran.core import Plan
from trimaran.models import Opaque, Outline, OutlineLayer, Step, Tower, split_outline, stages_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlice:
    """Equal blocks of one tower that stand on one rank."""

    tower: Tower
    block: OutlineLayer | Opaque
    count: int


class Holding(NamedTuple):
    """Parameters that a rank has of one tower. `dense` are all but the routed experts, `root` embedding and head."""

    tower: Tower
    dense: int
    experts: int
    root: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # made once for each cut: the same, or another
class RankPart:
    """The blocks and parameters of one rank of the pipeline, before they are sharded over the data ranks.

    Experts are counted apart from `dense`: they shard elsewhere. `embedding` and `head` are in `dense`, and so is all
    that lies in no layer. `frozen` is how many of all are not trained. `flying` is for how many micro-batches at
    once the rank keeps the activations of its layers. `works` is False for a rank that would have nothing to do.
    """

    pieces: tuple[LayerSlice, ...]
    dense: int
    experts: int
    embedding: int
    head: int
    frozen: int
    flying: float
    head_tower: Tower | None
    holdings: tuple[Holding, ...] = ()
    works: bool = True

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        return self.parameters - self.frozen

    @property
    def root(self) -> int:
        """Of `dense`, the embedding and the head: they lie in no layer, and are whole while any layer works."""
        return self.embedding + self.head

    @property
    def layers(self) -> int:
        return sum(piece.count for piece in self.pieces)


Split = Literal["cheapest", "thresholds"]
StageSplit = tuple[int, int, int, str, tuple[int, ...], Split]  # tp, pp, ep, schedule, stages, and how these are made


def parts_of(outline: Outline, plan: Plan, *, seq_len: int, split: Split = "cheapest") -> tuple[RankPart, ...]:
    """Return what each rank of the pipeline has; without a pipeline, one. All else that is split is split alike.

    `split` is how the layers become stages where the plan does not list them: so that the dearest stage costs least,
    or as nanotron deals them out.
    """
    mesh, pipeline = plan.mesh, plan.pipeline
    cut = (mesh.tp, mesh.pp, mesh.ep, pipeline.schedule, pipeline.stages, split)
    return _parts(outline, cut, plan.grad_accum, seq_len)


@lru_cache(maxsize=4096)  # a search asks again for each plan that cuts alike
def _parts(outline: Outline, cut: StageSplit, micro_batches: int, seq_len: int) -> tuple[RankPart, ...]:
    tp, pp, ep, schedule, stages, split = cut
    rounds = 2 if schedule in ("interleaved", "zero-bubble") else 1
    num_stages = 1 if pp == 1 else len(stages) or rounds * pp
    spans = None
    if pp > 1 and stages:
        counts = stages
    elif split == "thresholds":
        counts, spans = dealt(outline, num_stages)
    else:
        counts = split_outline(outline, num_stages, seq_len=seq_len)
    steps, bounds = list(outline.steps()), list(accumulate(counts, initial=0))
    cuts = [steps[start:stop] for start, stop in pairwise(bounds)]
    begins: dict[str, int] = {}
    for stage, here in enumerate(cuts):
        for step in here:
            begins.setdefault(step.tower.name, stage)
    parts = []
    for pp_rank in range(pp):
        mine = stages_of_rank(schedule, pp, pp_rank, num_stages)
        here = [step for stage in mine for step in cuts[stage]]
        flying = in_flight(schedule, ranks=pp, pp_rank=pp_rank, rounds=num_stages // pp, count=micro_batches)
        begun = [name for name, stage in begins.items() if stage in mine]
        part = _part(here, outline, (tp, ep), ends=(0 in mine, num_stages - 1 in mine), begun=begun, flying=flying)
        works = any(spans[stage] for stage in mine) and micro_batches >= pp - 1 if spans else bool(here)
        parts.append(part if works else replace(part, works=False))
    return tuple(parts)


def distinct_parts(outline: Outline, plan: Plan, seq_len: int, split: Split) -> tuple[tuple[RankPart, ...], bool]:
    """Return the ranks that differ, and whether all of them work.

    They are the first rank, the last, and of those between, the ones that hold more of something than another.
    """
    mesh, pipeline = plan.mesh, plan.pipeline
    cut = (mesh.tp, mesh.pp, mesh.ep, pipeline.schedule, pipeline.stages, split)
    return _distinct(outline, cut, plan.grad_accum, seq_len)


@lru_cache(maxsize=4096)
def _distinct(outline: Outline, cut: StageSplit, micro_batches: int, seq_len: int) -> tuple[tuple[RankPart, ...], bool]:
    parts = _parts(outline, cut, micro_batches, seq_len)
    between: list[RankPart] = []
    for part in parts[1:-1]:
        if not any(_holds_more(other, part) for other in (parts[0], *between)):
            between.append(part)
    return (*parts[:1], *between, *parts[1:][-1:]), all(part.works for part in parts)


def _holds_more(part: RankPart, other: RankPart) -> bool:
    """Return whether the rank has all that the other has, of one kind of block, and keeps it for as many at once."""
    blocks = {piece.block for each in (part, other) for piece in each.pieces}
    return (
        len(blocks) == 1
        and part.layers >= other.layers
        and part.dense >= other.dense
        and part.flying >= other.flying
        and other.head_tower is None
    )


def dealt(outline: Outline, num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers, and all modules, that each stage gets when they are dealt out as nanotron does.

    A stage takes modules until the weights so far exceed its share of the whole. Embedding, last norm, cast and loss
    are modules without weight, the head weighs what it has. The late stages may be left with nothing at all, and that
    ends the run; so do fewer micro-batches than a pipeline has stages to fill.
    """
    main = outline.main
    weights = [
        block.active_weights if isinstance(block, OutlineLayer) else block.parameters for _, block in outline.steps()
    ]
    modules = [0, *weights, 0, main.head_parameters, 0, 0]
    total, so_far, stage = sum(modules), 0, 0
    layers, spans = [0] * num_stages, [0] * num_stages
    for number, weight in enumerate(modules):
        so_far += weight
        spans[stage] += 1
        layers[stage] += 1 <= number <= len(weights)
        if so_far * num_stages > total * (stage + 1) and stage < num_stages - 1:
            stage += 1
    return tuple(layers), tuple(spans)


def _part(
    steps: Sequence[Step],
    outline: Outline,
    split: tuple[int, int],
    *,
    ends: tuple[bool, bool],
    begun: Sequence[str],
    flying: float,
) -> RankPart:
    """Return the part of these steps. Towers beside the main one have what is in no block where they begin."""
    tp, ep = split
    main, whole = outline.main, len(steps) == outline.layers  # else a tied head is a copy of its own
    pieces = tuple(LayerSlice(tower=key.tower, block=key.block, count=len(list(run))) for key, run in groupby(steps))
    towers = list(dict.fromkeys(piece.tower for piece in pieces))
    towers += [main] if any(ends) and main not in towers else []
    holdings, embedding, head = [], 0, 0
    for tower in towers:
        mine = [piece for piece in pieces if piece.tower is tower]
        # The main tower's embedding is where the samples come in.
        first, last = ends if tower is main else (tower.name in begun,) * 2
        table = tower.embedding_parameters // tp if first else 0
        scores = 0 if not last or (tower.tied and whole) else tower.head_parameters // tp
        dense = sum(piece.count * _dense(piece.block, tp) for piece in mine)
        dense += table + scores + (tower.extras if last else 0)
        experts = sum(piece.count * _experts(piece.block) for piece in mine) // (tp * ep)
        holdings.append(Holding(tower, dense, experts, table + scores, sum(piece.count for piece in mine)))
        embedding, head = embedding + table, head + scores
    return RankPart(
        pieces=pieces, dense=sum(each.dense for each in holdings), experts=sum(each.experts for each in holdings),
        embedding=embedding, head=head, frozen=sum(each.dense + each.experts for each in holdings if each.tower.frozen),
        flying=flying, head_tower=main if ends[1] and main.outputs > 0 else None, holdings=tuple(holdings),
    )  # fmt: skip


def _experts(block: OutlineLayer | Opaque) -> int:
    return block.expert_weights if isinstance(block, OutlineLayer) else 0


def _dense(block: OutlineLayer | Opaque, tp: int) -> int:
    """Return the parameters of one block on a slice: products are split, routers, norms and biases are not."""
    if isinstance(block, Opaque):
        return block.parameters
    return block.dense_weights // tp + block.router_weights + block.extras


def in_flight(schedule: str, *, ranks: int, pp_rank: int, rounds: int, count: int) -> float:
    """Return for how many micro-batches a rank keeps the activations of all its layers when it keeps the most.

    GPipe keeps all of them. 1F1B keeps as many as there are stages from here on. With several stages a rank the stages
    count one by one: as many as are started before the first comes back.
    """
    if ranks == 1:
        return 1
    match schedule:
        case "gpipe":
            return count
        case "1f1b":
            return min(ranks - pp_rank, count)
        case "interleaved":
            in_a_round = count // max(1, count // ranks)
            started = (rounds - 1) * in_a_round + 2 * (ranks - 1 - pp_rank) + 1
            return min(started, rounds * count) / rounds
        case _:  # zero-bubble, in the shape of a V
            return min(ranks, count)

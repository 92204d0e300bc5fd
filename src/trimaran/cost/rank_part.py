"""The part of a model that one rank holds, after pipeline, tensor and expert parallelism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from trimaran.core import Plan
from trimaran.models import LinearShape, Opaque, Outline, OutlineLayer, Step, Tower, split_outline, stages_of_rank
from trimaran.models.outline import linears_of

# Weights in a row that share one fp32 scale in the 4-bit format (NF4): each takes half a byte and a 64th of 4 bytes.
PACKED_BLOCK = 64
PACKED_BYTES = 0.5 + 4 / PACKED_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal consecutive blocks of one tower on one rank."""

    tower: Tower
    block: OutlineLayer | Opaque
    count: int


class Holding(NamedTuple):
    """Parameters that a rank holds of one tower: all of them; with adapters the frozen, 4-bit or trained ones.

    dense: all parameters but those of routed experts. `root`, the embedding and the head, is part of it, and so are
        adapters.
    is_compact: frozen weights that are stored in the compute precision, except those of `routers`, which are fp32.
    largest_packed: above 0 if the weights are 4-bit ones, which are never sharded: the largest, as it is unpacked for
        its matmul.
    """

    tower: Tower
    dense: int
    experts: int
    root: int
    layers: int
    is_trained: bool = True
    is_compact: bool = False
    magnitudes: int = 0  # parameters of adapters that are not matrices: DoRA's
    routers: int = 0
    largest_packed: int = 0

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # cached once per split, so identity is equality
class RankPart:
    """The blocks and parameters of one pipeline rank, before they are sharded over the data ranks.

    dense: all parameters but those of routed experts, which are sharded over other ranks. Adapters are among them.
    embedding, head: included in `dense`, like everything else outside the layers.
    """

    layer_groups: tuple[LayerGroup, ...]
    dense: int
    experts: int
    embedding: int
    head: int
    frozen: int  # how many of all parameters are not trained
    in_flight: float  # for how many micro-batches at once the rank holds the activations of its layers
    head_tower: Tower | None
    holdings: tuple[Holding, ...] = ()
    deferred: float = 0.0  # for how many of them backward has run, but not yet for the weights (zero-bubble)
    received: int = 0  # messages that the rank receives from others for each micro-batch, activations and gradients
    has_work: bool = True  # False for a rank without layers

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        return self.parameters - self.frozen

    @property
    def root(self) -> int:
        """Parameters of embedding and head. They belong to no layer and stay gathered while layers run."""
        return self.embedding + self.head

    @property
    def layers(self) -> int:
        return sum(group.count for group in self.layer_groups)


Split = Literal["cheapest", "thresholds"]
# tp, pp, ep, schedule, stages, how to split layers, and the towers that tensor-parallel ranks replicate.
StageSplit = tuple[int, int, int, str, tuple[int, ...], Split, tuple[str, ...]]


def parts_of(outline: Outline, plan: Plan, *, seq_len: int, split: Split = "cheapest") -> tuple[RankPart, ...]:
    """Return the part of each pipeline rank; without a pipeline, of the only one.

    `split` says how layers are split into stages where the plan does not list them: so that the most expensive stage
    is as cheap as possible, or as nanotron does it.
    """
    return _parts(outline, _stage_split(plan, split), plan.grad_accum, seq_len)


def _stage_split(plan: Plan, split: Split) -> StageSplit:
    mesh, pipeline = plan.mesh, plan.pipeline
    replicated = tuple(name for name, own in plan.towers.items() if own.tp == 1 < mesh.tp) if plan.towers else ()
    return mesh.tp, mesh.pp, mesh.ep, pipeline.schedule, pipeline.stages, split, replicated


@lru_cache(maxsize=4096)  # many plans of a search share one split
def _parts(outline: Outline, key: StageSplit, micro_batches: int, seq_len: int) -> tuple[RankPart, ...]:
    tp, pp, ep, schedule, stages, split, replicated = key
    rounds = 2 if schedule in ("interleaved", "zero-bubble") else 1
    num_stages = 1 if pp == 1 else len(stages) or rounds * pp
    num_modules = None
    if pp > 1 and stages:
        counts = stages
    elif split == "thresholds":
        counts, num_modules = nanotron_stages(outline, num_stages)
    else:
        counts = split_outline(outline, num_stages, seq_len=seq_len)
    steps, bounds = list(outline.steps()), list(accumulate(counts, initial=0))
    stage_steps = [steps[start:stop] for start, stop in pairwise(bounds)]
    first_stage: dict[str, int] = {}
    for stage, steps_here in enumerate(stage_steps):
        for step in steps_here:
            first_stage.setdefault(step.tower.name, stage)
    parts = []
    for pp_rank in range(pp):
        here = stages_of_rank(schedule, pp, pp_rank, num_stages)
        steps_here = [step for stage in here for step in stage_steps[stage]]
        part = _part(
            steps_here,
            outline,
            (tp, ep, replicated),
            ends=(0 in here, num_stages - 1 in here),
            starting=[name for name, stage in first_stage.items() if stage in here],
            in_flight=max_in_flight(schedule, ranks=pp, pp_rank=pp_rank, rounds=num_stages // pp, count=micro_batches),
        )
        received = sum(stage > 0 and stage - 1 not in here for stage in here)
        received += sum(stage < num_stages - 1 and stage + 1 not in here for stage in here)
        deferred = 0.0
        if pp > 1 and schedule == "zero-bubble":
            deferred = 0.5 if 2 * pp_rank < pp else pp_rank + 0.5
        part = replace(part, received=received, deferred=deferred)
        has_work = bool(steps_here)
        if num_modules:
            has_work = any(num_modules[stage] for stage in here) and micro_batches >= pp - 1
        parts.append(part if has_work else replace(part, has_work=False))
    return tuple(parts)


def distinct_parts(outline: Outline, plan: Plan, seq_len: int, split: Split) -> tuple[tuple[RankPart, ...], bool]:
    """Return the ranks that may have the peak, and whether every rank has work.

    These are the first rank, the last one, and those in between that hold more of something than the others.
    """
    return _distinct(outline, _stage_split(plan, split), plan.grad_accum, seq_len)


@lru_cache(maxsize=4096)
def _distinct(outline: Outline, key: StageSplit, micro_batches: int, seq_len: int) -> tuple[tuple[RankPart, ...], bool]:
    parts = _parts(outline, key, micro_batches, seq_len)
    between: list[RankPart] = []
    for part in parts[1:-1]:
        if not any(_holds_at_least(other, part) for other in (parts[0], *between)):
            between.append(part)
    return (*parts[:1], *between, *parts[1:][-1:]), all(part.has_work for part in parts)


def _holds_at_least(part: RankPart, other: RankPart) -> bool:
    """Return whether `part` holds at least what `other` holds, of one kind of block, for as many micro-batches."""
    blocks = {group.block for each in (part, other) for group in each.layer_groups}
    return (
        len(blocks) == 1
        and part.layers >= other.layers
        and part.dense >= other.dense
        and part.in_flight >= other.in_flight
        and part.deferred >= other.deferred
        and other.head_tower is None
    )


def nanotron_stages(outline: Outline, num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many layers, and how many modules, each stage gets by nanotron's rule.

    A stage takes modules until the weights so far exceed its fraction of the total. Embedding, last norm, cast and loss
    are modules without weight; the head counts its parameters. Late stages may get no module at all, and then the run
    fails. It also fails with fewer micro-batches than the pipeline needs to fill.
    """
    main = outline.main
    weights = [
        block.active_weights if isinstance(block, OutlineLayer) else block.parameters for _, block in outline.steps()
    ]
    modules = [0, *weights, 0, main.head_parameters, 0, 0]
    total, so_far, stage = sum(modules), 0, 0
    layers, num_modules = [0] * num_stages, [0] * num_stages
    for number, weight in enumerate(modules):
        so_far += weight
        num_modules[stage] += 1
        layers[stage] += 1 <= number <= len(weights)
        if so_far * num_stages > total * (stage + 1) and stage < num_stages - 1:
            stage += 1
    return tuple(layers), tuple(num_modules)


def _part(
    steps: Sequence[Step],
    outline: Outline,
    split: tuple[int, int, tuple[str, ...]],
    *,
    ends: tuple[bool, bool],
    starting: Sequence[str],
    in_flight: float,
) -> RankPart:
    """Return the part that these steps make up.

    `starting` are the towers whose first block is here. A tower beside the main one has its parameters outside the
    blocks on that rank.
    """
    mesh_tp, ep, replicated = split
    main, is_complete = outline.main, len(steps) == outline.layers  # a tied head on another rank is a copy
    groups = tuple(LayerGroup(tower=key.tower, block=key.block, count=len(list(run))) for key, run in groupby(steps))
    towers = list(dict.fromkeys(group.tower for group in groups))
    towers += [main] if any(ends) and main not in towers else []
    holdings, embedding, head = [], 0, 0
    for tower in towers:
        blocks, tp = [group for group in groups if group.tower is tower], 1 if tower.name in replicated else mesh_tp
        # Samples enter at the first rank, so the main tower's embedding is there.
        first, last = ends if tower is main else (tower.name in starting,) * 2
        # A last stage that predicts later tokens has a copy of it; that of a tied model has one as its head.
        copies = last and tower.prediction_layers > 0 and not tower.tied
        embedding_here = tower.embedding_rows(tp) * tower.hidden if first or copies else 0
        head_here = 0 if not last or (tower.tied and is_complete) else tower.head_rows(tp) * tower.hidden
        dense = embedding_here + head_here + (tower.extras if last else 0)
        experts = 0
        for group in blocks:  # routers, norms and biases are not split
            if isinstance(block := group.block, Opaque):
                dense += group.count * block.parameters
            else:
                split_weights, whole = block.dense_weights // tp, block.router_weights + block.joining_weights
                dense += group.count * (split_weights + whole + block.extras)
                experts += group.count * block.expert_weights
        experts //= tp * ep
        layers = sum(group.count for group in blocks)
        held = Holding(tower, dense, experts, embedding_here + head_here, layers, is_trained=not tower.frozen)
        holdings += _frozen_and_trained(held, blocks, (embedding_here, head_here), tp) if tower.frozen else [held]
        embedding, head = embedding + embedding_here, head + head_here
    return RankPart(
        layer_groups=groups,
        dense=sum(each.dense for each in holdings),
        experts=sum(each.experts for each in holdings),
        embedding=embedding,
        head=head,
        frozen=sum(each.parameters for each in holdings if not each.is_trained),
        in_flight=in_flight,
        head_tower=main if ends[1] and main.outputs > 0 else None,
        holdings=tuple(holdings),
    )


def _frozen_and_trained(held: Holding, blocks: list[LayerGroup], ends: tuple[int, int], tp: int) -> list[Holding]:
    """Return the frozen parameters of a frozen tower, its 4-bit ones, and its trained ones.

    Trained are its adapters, and an embedding or a head that is trained in full.
    """
    tower, (embedding, head) = held.tower, ends
    root = embedding * tower.trains_embedding + head * tower.trains_head
    layers = [(group.block, group.count) for group in blocks if isinstance(group.block, OutlineLayer)]
    sizes = [(math.prod(each.on_rank(tp)), count) for layer, count in layers for each in packed_linears(layer)]
    packed = sum(size * count for size, count in sizes)
    adapter = sum(count * layer.adapter_parameters(tp) for layer, count in layers)
    adapter += tower.head_rank * (tower.hidden + tower.head_rows(tp)) if head else 0
    routers = sum(count * layer.hidden * layer.experts.num_experts for layer, count in layers if layer.experts)
    rest = {"dense": held.dense - root - packed, "root": held.root - root}
    holdings = [held._replace(**rest, is_compact=tower.compact, routers=routers)]
    if packed:
        largest = max(size for size, _ in sizes)
        held = Holding(tower, packed, 0, 0, held.layers, is_trained=False, is_compact=True, largest_packed=largest)
        holdings.append(held)
    if adapter + root:
        with_magnitude = [pair for pair in layers if pair[0].adapter and pair[0].adapter.has_magnitude]
        magnitudes = sum(
            count * each.on_rank(tp)[1] for layer, count in with_magnitude for each in layer.adapted_linears
        )
        holdings.append(Holding(tower, adapter + root, 0, root, held.layers, magnitudes=magnitudes))
    return holdings


def packed_linears(layer: OutlineLayer) -> tuple[LinearShape, ...]:
    """Return the frozen linear layers that are stored in 4 bits: those whose rows are whole blocks."""
    if layer.adapter is None or not layer.adapter.is_4bit:
        return ()
    return tuple(linear for linear in linears_of(layer) if linear.inputs % PACKED_BLOCK == 0)


def max_in_flight(schedule: str, *, ranks: int, pp_rank: int, rounds: int, count: int) -> float:
    """Return the most micro-batches for which a rank holds the activations of all its layers at once.

    GPipe holds all of them. 1F1B holds as many as there are stages from this rank on. With several stages per rank,
    count stage by stage: as many as have started before the first backward. The last half of the ranks of a V-shaped
    schedule (zero-bubble) need the most memory at its end, when the gradients of weights are deferred.
    """
    if ranks == 1:
        return 1
    match schedule:
        case "gpipe":
            return count
        case "1f1b":
            return min(ranks - pp_rank, count)
        case "interleaved":
            per_round = count // max(1, count // ranks)
            started = (rounds - 1) * per_round + 2 * (ranks - 1 - pp_rank) + 1
            return min(started, rounds * count) / rounds
        case _:  # zero-bubble
            return min(ranks if 2 * pp_rank < ranks else (ranks + pp_rank) / 2, count)

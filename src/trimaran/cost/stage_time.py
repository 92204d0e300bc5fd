"""How long each rank of a pipeline is busy with one micro-batch: what it computes, and what it waits for inside."""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Mesh, Pipeline, Plan
from trimaran.core.plan import TowerPlan
from trimaran.cost.block_time import (
    IMBALANCE,
    BlockSplit,
    Passes,
    fused_passes,
    head_passes,
    layer_passes,
    opaque_passes,
)
from trimaran.cost.collective import Ring, all_gather_seconds, all_to_all_seconds, ring_of, send_seconds
from trimaran.cost.job import Job, splits_weights
from trimaran.cost.loss_kind import loss_of
from trimaran.cost.rank_part import LayerSlice, RankPart, parts_of
from trimaran.cost.roofline import DeviceRates
from trimaran.hardware import Link
from trimaran.models import Opaque, OutlineLayer

KERNEL_SECONDS = 8e-6  # for the host to start one kernel of a block whose kernels are counted (an H200's host)
PLAIN = Plan()
FORWARD_HOST = 0.4  # of a layer's host time; the rest is backward's
# Host and device run beside each other, yet neither is always ahead: together they take a little more than the longer.
HOST_POWER = 6


class Ask(NamedTuple):
    """All that a micro-batch's time depends on: what is remembered of a plan, whatever its data ranks do."""

    job: Job
    rates: DeviceRates
    levels: tuple[Link, ...]
    degrees: tuple[int, int, int, int]  # tp, pp, cp, ep
    pipeline: tuple[str, tuple[int, ...]]
    micro_batch: int
    recompute: str | int
    towers: tuple[tuple[str, TowerPlan], ...]
    kind: "StageKind"
    context: str


class StageKind(NamedTuple):
    """How blocks and the loss run: `splits` is whether matrices are kept as two halves, which are not cast."""

    is_compiled: bool
    is_fp8: bool
    splits: bool
    loss: str


class TimeUnit(NamedTuple):
    """Equal blocks, whose weights travel one by one: parameters and seconds of one. `sharding` None is the plan's."""

    count: int
    dense: float
    experts: float
    is_trained: bool
    sharding: str | None
    forward: float
    backward: float


class StageTime(NamedTuple):
    """One rank's micro-batch: seconds that it computes, and that it waits for others by what travels; its blocks."""

    part: RankPart
    forward: float
    backward: float
    waits: dict[str, float]
    units: tuple[TimeUnit, ...]
    seconds: float


class StageTimes(NamedTuple):
    """The ranks of a pipeline: who is slowest, who has the most parameters, and the seconds of all, added up."""

    slowest: StageTime
    heaviest: StageTime
    seconds: float


def ask_of(job: Job, rates: DeviceRates, levels: tuple[Link, ...], plan: Plan) -> Ask:
    """Return what of the plan a micro-batch's time depends on."""
    mesh, pipeline = plan.mesh, plan.pipeline
    cut = (pipeline.schedule, pipeline.stages) if mesh.pp > 1 else ("1f1b", ())
    return Ask(
        job, rates, levels, (mesh.tp, mesh.pp, mesh.cp, mesh.ep), cut, plan.micro_batch, plan.recompute,
        tuple(plan.towers.items()),
        StageKind(plan.compile, plan.precision == "fp8", splits_weights(job, plan), loss_of(job, plan)), plan.comm.context,
    )  # fmt: skip


@lru_cache(maxsize=1 << 14)
def stage_times_of(ask: Ask) -> StageTimes:
    """Return the paces of a pipeline's ranks; without a pipeline there is one."""
    (tp, pp, cp, ep), (schedule, stages), job = ask.degrees, ask.pipeline, ask.job
    cut = Pipeline.model_construct(schedule=schedule, stages=stages)
    plan = PLAIN.model_copy(update={
        "mesh": Mesh(tp=tp, pp=pp, cp=cp, ep=ep), "pipeline": cut, "micro_batch": ask.micro_batch,
        "recompute": ask.recompute, "towers": dict(ask.towers),
    })  # fmt: skip
    known: dict[tuple, StageTime] = {}  # ranks that hold alike blocks share one
    paces = []
    for part in parts_of(job.outline, plan, seq_len=job.seq_len, split=job.stack.memory.split):
        alike = (part.pieces, part.embedding, part.head, part.head_tower)
        if alike not in known:
            known[alike] = _pace(ask, plan, part)
        paces.append(known[alike])
    slowest = max(paces, key=lambda pace: pace.seconds)
    heaviest = max(paces, key=lambda pace: pace.part.parameters)
    return StageTimes(slowest, heaviest, sum(pace.seconds for pace in paces))


def _pace(ask: Ask, plan: Plan, part: RankPart) -> StageTime:
    """Return the pace of one rank. A device that is fed slower than it works waits for its host."""
    units, waits, host = [], defaultdict[str, float](float), 0.0
    for piece in part.pieces:
        unit, again = _unit(ask, plan, piece)
        units.append(unit)
        rounds = 1 + (unit.backward > 0) + again
        for key, seconds in _layer_waits(ask, plan, piece):
            waits[key] += piece.count * rounds * seconds
        starts = 1.0 + FORWARD_HOST * again if unit.backward else FORWARD_HOST
        host += piece.count * starts * _host_seconds(ask, piece)
    forward = sum(unit.count * unit.forward for unit in units)
    backward = sum(unit.count * unit.backward for unit in units)
    if ask.rates.width == 2:
        backward += ask.job.stack.time.passing.cast * _cast(ask, part) / ask.rates.stream
    near = ask.levels[0].name  # what waits for a network waits on the host as well
    busy = forward + backward + sum(seconds for key, seconds in waits.items() if key.endswith(near))
    slower = (1 + (host / busy) ** HOST_POWER) ** (1 / HOST_POWER) if busy else 1.0
    idle = busy * (slower - 1) / (forward + backward) if busy else 0.0
    root, ends = _root(ask, part)
    for key, seconds in _edge_waits(ask, plan, part):
        waits[key] += seconds
    forward, backward = forward * (1 + idle) + ends[0], backward * (1 + idle) + ends[1]
    return StageTime(part, forward, backward, waits, (*units, root), forward + backward + sum(waits.values()))


def _cast(ask: Ask, part: RankPart) -> int:
    """Return how many parameters are cast for a micro-batch; of matrices in halves, those that are frozen or shared."""
    if not ask.kind.splits:
        return part.parameters
    shared = sum(holding.root for holding in part.holdings if holding.tower.tied and not holding.tower.frozen)
    return part.frozen + shared


def _unit(ask: Ask, plan: Plan, piece: LayerSlice) -> tuple[TimeUnit, float]:
    """Return one block of a piece, and which share of its forward is done again, with all that it waits for."""
    job, block, mesh = ask.job, piece.block, plan.mesh
    if isinstance(block, Opaque):
        passes, dense, experts = opaque_passes(block, ask.micro_batch, ask.rates), float(block.parameters), 0.0
    else:
        cut = BlockSplit(job.positions(piece.tower, plan), piece.tower.places(job.seq_len)[1], mesh.tp, mesh.ep)
        passes = layer_passes(block, cut, ask.rates, job.stack.time, compiled=ask.kind.is_compiled, fp8=ask.kind.is_fp8)
        dense = block.dense_weights / mesh.tp + block.router_weights + block.extras
        experts = block.expert_weights / (mesh.tp * mesh.ep)
    trains, reaches = _gradients(ask, piece)
    seconds, share = _again(job.recompute_of(piece.tower, plan), passes, piece.count)
    backward = passes.to_input * reaches + passes.to_weights * trains
    if not backward:
        seconds = share = 0.0
    sharding = job.sharding_of(piece.tower, plan) if plan.towers else None
    return TimeUnit(piece.count, dense, experts, trains, sharding, passes.forward, backward + seconds), share


def _again(recompute: str | int, passes: Passes, count: int) -> tuple[float, float]:
    """Return how long a block computes again in backward, on average over the equal ones, and in how many of them."""
    if recompute == "none":
        return 0.0, 0.0
    if recompute == "selective":
        return passes.selective, 0.0
    share = 1.0 if recompute == "full" else -(-count // int(recompute)) / count
    return share * passes.full, share


def _gradients(ask: Ask, piece: LayerSlice) -> tuple[bool, bool]:
    """Return whether a piece's weights have gradients, and its input: where anything before it trains."""
    if not piece.tower.frozen:
        return True, True
    towers = ask.job.outline.towers
    return False, not all(tower.frozen for tower in towers[: towers.index(piece.tower)])


def _layer_waits(ask: Ask, plan: Plan, piece: LayerSlice) -> Iterator[tuple[str, float]]:
    """Yield what one forward of a block waits for, by what travels and where; backward has its mirror image.

    Tensor parallelism gathers the sequence and scatters the sum, once for attention and once for the feed-forward.
    Context parallelism gathers keys and values, or exchanges heads for positions and back. Expert parallelism sends
    each token to its experts and back.
    """
    layer, (tp, _, cp, ep) = piece.block, ask.degrees
    if not isinstance(layer, OutlineLayer):
        return
    width, positions = ask.rates.width, ask.job.positions(piece.tower, plan)
    if tp > 1:
        slices = ring_of(ask.levels, tp, 1)
        halves = 2 if layer.heads else 1
        seconds = 2 * halves * all_gather_seconds(width * positions * layer.hidden, slices)
        yield f"tensor slices on {slices.link}", (1 - ask.job.stack.time.hidden_slices) * seconds
    if cp > 1 and layer.heads:
        pieces = ring_of(ask.levels, cp, tp)
        keys = layer.kv_heads * (layer.head_dim + layer.value_dim)
        if ask.context == "gather":
            seconds = all_gather_seconds(width * positions * cp * keys / tp, pieces)
        else:
            heads = keys + layer.heads * (layer.head_dim + layer.value_dim)
            seconds = all_to_all_seconds(width * positions * heads / tp, pieces)
        yield f"parts of the sequence on {pieces.link}", seconds
    if ep > 1 and layer.experts is not None:
        homes = ring_of(ask.levels, ep, tp)
        moved = IMBALANCE * width * positions * layer.experts.top_k * layer.hidden / tp
        crossing = _crossing(homes, layer.experts.top_k) if ask.job.stack.time.sends_once else 1.0
        yield f"experts on {homes.link}", 2 * all_to_all_seconds(moved, homes, crossing=crossing)


def _crossing(homes: Ring, top_k: int) -> float:
    """Return which part of a token's copies for other nodes travels when each node gets one, whoever needs it there."""
    nodes = homes.num_ranks / homes.inside
    return (1 - (1 - 1 / nodes) ** top_k) * nodes / top_k


def _edge_waits(ask: Ask, plan: Plan, part: RankPart) -> Iterator[tuple[str, float]]:
    """Yield what a rank waits for at the ends of its stages: the sums of a cut vocabulary, and its neighbours.

    Neighbours in a pipeline are the farthest ranks there are: all other axes lie between them.
    """
    (tp, pp, *_), main = ask.degrees, ask.job.outline.main
    stream = ask.rates.width * ask.job.positions(main, plan) * main.hidden
    if tp > 1:
        slices = ring_of(ask.levels, tp, 1)
        ends = (part.embedding > 0) + (part.head_tower is not None)
        yield f"tensor slices on {slices.link}", 2 * ends * all_gather_seconds(stream, slices)
    if pp > 1:
        pipe = ring_of(ask.levels, pp, max(1, ask.levels[-1].devices // pp))
        if part.pieces and isinstance(last := part.pieces[-1].block, Opaque):
            stream = last.output_bytes * ask.micro_batch * tp
        yield f"between stages on {pipe.link}", 2 * plan.num_stages / pp * send_seconds(stream / tp, pipe)


def _host_seconds(ask: Ask, piece: LayerSlice) -> float:
    """Return how long the host needs to start a block's forward and backward."""
    if isinstance(piece.block, Opaque):
        return piece.block.num_kernels * KERNEL_SECONDS / FORWARD_HOST
    host, (tp, pp, *_) = ask.job.stack.time.host, ask.degrees
    sliced = 0.0
    if tp > 1:
        sliced = host.sliced + (tp * host.crossing if pp > 1 and len(ask.levels) > 1 else 0.0)
    return (host.compiled if ask.kind.is_compiled else host.eager) + sliced


def _root(ask: Ask, part: RankPart) -> tuple[TimeUnit, tuple[float, float]]:
    """Return what lies in no block, embedding, head and loss, and how long it is at work in forward and in backward.

    A fused loss has its gradients in forward. They travel with those of the blocks all the same, so the unit has as
    long to hide them as it has with logits.
    """
    main, weights = ask.job.outline.main, float(part.root)
    if (tower := part.head_tower) is None:
        return TimeUnit(1, weights, 0.0, not main.frozen, None, 0.0, 0.0), (0.0, 0.0)
    positions = ask.micro_batch * tower.places(ask.job.seq_len)[0] // ask.degrees[2]
    cut, loss = BlockSplit(positions, 0, ask.degrees[0], 1), ask.kind.loss
    passes = head_passes(tower, cut, ask.rates, ask.job.stack.time)
    ends = passes.forward, passes.to_input + passes.to_weights * (not tower.frozen)
    unit = TimeUnit(1, weights, 0.0, not main.frozen, None, *ends)
    if loss != "logits":
        fused = fused_passes(tower, cut, ask.rates, chunked=loss == "chunked")
        ends = fused.forward + fused.to_weights * (not tower.frozen), fused.to_input
    return unit, ends

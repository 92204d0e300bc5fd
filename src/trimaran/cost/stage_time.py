"""Time of one micro-batch on each pipeline rank: compute, launches, and communication inside the layers."""

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import RECOMPUTED_BY_OPERATOR, Mesh, Pipeline, Plan, TowerPlan
from trimaran.cost.block_time import (
    BlockKind,
    BlockSplit,
    context_copy_seconds,
    fused_passes,
    head_passes,
    layer_attention,
    layer_passes,
    opaque_passes,
)
from trimaran.cost.collective import all_gather_seconds, all_reduce_seconds, all_to_all_seconds, ring_of, send_seconds
from trimaran.cost.job import Job, captures_steps, joins_projections, loss_of, regathers, splits_weights
from trimaran.cost.rank_part import LayerGroup, RankPart, packed_linears, parts_of
from trimaran.cost.roofline import FORWARD_HOST_FRACTION, DeviceRates, host_wait, kernel_gaps, matmul_seconds, rates_for
from trimaran.cost.stack_profiles import TORCH_HOST
from trimaran.machine import Cluster, Link
from trimaran.models import Opaque, OutlineLayer

KERNEL_LAUNCH_SECONDS = 8e-6  # host time per kernel of an opaque block (the host of an H200)
ADAPTER_KERNELS = 10  # that an adapter adds to forward and backward: casts, matmuls, additions (counted)
DEFAULT_PLAN = Plan()
# Of a gather that runs beside a matmul: both need memory bandwidth and some of the SMs. Assumed.
EXPOSED_GATHER_FRACTION = 0.25
# Overhead of a block of ours and of embedding, loss and hooks of a micro-batch, in that of the block that is measured
# on a CPU: 64 to 256 tokens on two Neoverse cores.
CPU_BLOCK_OVERHEAD, CPU_EDGE_BLOCKS = 1.6, 2.0


class StageInputs(NamedTuple):
    """All that the time of a micro-batch depends on, whatever the data ranks do. The key of the cache."""

    job: Job
    rates: DeviceRates
    levels: tuple[Link, ...]
    degrees: tuple[int, int, int, int]  # tp, pp, cp, ep
    pipeline: tuple[str, tuple[int, ...]]
    micro_batch: int
    recompute: str | int
    towers: tuple[tuple[str, TowerPlan], ...]
    context: str
    regathers: bool
    is_compiled: bool
    fp8: str  # the recipe of its scales; empty without fp8
    splits: bool  # each matrix is stored as upper and lower 16 bits, so needs no cast
    joins: bool  # projections of the same input are one matmul
    is_captured: bool  # forward and backward are replayed as CUDA graphs
    loss: str


class TimeUnit(NamedTuple):
    """Equal blocks whose weights are communicated one block at a time.

    Parameters and seconds are of one block. `dense` and `experts` are sharded and gathered, which 4-bit weights are
    not; the `trained_` ones have gradients. `sharding` None means the plan's. With `splits_images` the tensor-parallel
    ranks process different images, so they hold shards, too.
    """

    count: int
    dense: float
    experts: float
    trained_dense: float
    trained_experts: float
    sharding: str | None
    forward: float
    backward: float
    splits_images: bool = False


class StageTime(NamedTuple):
    """One rank's micro-batch: compute seconds, exposed communication by what is sent and where, and its blocks."""

    part: RankPart
    forward: float
    backward: float
    waits: dict[str, float]
    units: tuple[TimeUnit, ...]
    seconds: float
    host_forward: float  # seconds that the host needs to launch it
    host_backward: float  # the same of backward
    has_waited: bool  # the seconds already contain the wait for the host


class StageTimes(NamedTuple):
    """The ranks of a pipeline: the slowest, the one with the most parameters, and the sum of all ranks' seconds."""

    slowest: StageTime
    heaviest: StageTime
    seconds: float


def stage_inputs_of(job: Job, rates: DeviceRates, levels: tuple[Link, ...], plan: Plan) -> StageInputs:
    mesh, pipeline = plan.mesh, plan.pipeline
    return StageInputs(
        job=job,
        rates=rates,
        levels=levels,
        degrees=(mesh.tp, mesh.pp, mesh.cp, mesh.ep),
        pipeline=(pipeline.schedule, pipeline.stages) if mesh.pp > 1 else ("1f1b", ()),
        micro_batch=plan.micro_batch,
        recompute=plan.recompute,
        towers=tuple(plan.towers.items()),
        context=plan.comm.context,
        regathers=regathers(job, plan),
        is_compiled=plan.compile,
        fp8=plan.fp8.recipe if plan.precision == "fp8" else "",
        splits=splits_weights(job, plan),
        joins=joins_projections(job, plan),
        is_captured=captures_steps(job, plan),
        loss=loss_of(job, plan),
    )


def stage_inputs_on(job: Job, cluster: Cluster, plan: Plan) -> StageInputs:
    return stage_inputs_of(job, rates_for(job, cluster, plan), levels_of(cluster), plan)


@lru_cache(maxsize=256)
def levels_of(cluster: Cluster) -> tuple[Link, ...]:
    """Return the levels of a cluster's links, which a search asks for with every plan."""
    return cluster.levels


@lru_cache(maxsize=1 << 14)
def stage_times_of(inputs: StageInputs) -> StageTimes:
    """Return the times of a pipeline's ranks; without a pipeline, of the only one."""
    times = rank_times_of(inputs)
    slowest = max(times, key=lambda stage: stage.seconds)
    heaviest = max(times, key=lambda stage: stage.part.parameters)
    return StageTimes(slowest, heaviest, sum(stage.seconds for stage in times))


def rank_times_of(inputs: StageInputs) -> list[StageTime]:
    """Return the time of each pipeline rank, first to last."""
    (tp, pp, cp, ep), (schedule, stages), job = inputs.degrees, inputs.pipeline, inputs.job
    mesh = Mesh.model_construct(tp=tp, pp=pp, cp=cp, ep=ep)
    pipeline = Pipeline.model_construct(schedule=schedule, stages=stages)
    plan = DEFAULT_PLAN.model_copy(update={
        "mesh": mesh, "pipeline": pipeline, "micro_batch": inputs.micro_batch,
        "recompute": inputs.recompute, "towers": dict(inputs.towers),
    })  # fmt: skip
    by_key: dict[tuple, StageTime] = {}  # ranks with equal blocks share one entry
    times = []
    for part in parts_of(job.outline, plan, seq_len=job.seq_len, split=job.stack.memory.split):
        key = (part.layer_groups, part.embedding, part.head, part.head_tower)
        if key not in by_key:
            by_key[key] = _stage_time(inputs, plan, part)
        times.append(by_key[key])
    return times


def _stage_time(inputs: StageInputs, plan: Plan, part: RankPart) -> StageTime:
    """Return the time of one rank.

    A rank of a pipeline waits for its neighbours in every micro-batch, so its host cannot be further ahead than one:
    the wait for the host is counted here. So it is for a stack whose host does not run ahead, and for a CPU, which is
    its own host. Elsewhere it is counted once for the whole step (`step_time`).
    """
    job, rates = inputs.job, inputs.rates
    units, waits = [], defaultdict[str, float](float)
    host_forward = host_backward = 0.0
    for group in part.layer_groups:
        unit, repeats = _unit(inputs, plan, group)
        units.append(unit)
        rounds = 1 + (unit.backward > 0) + repeats
        for key, seconds in _layer_waits(inputs, plan, group):
            waits[key] += group.count * rounds * seconds
        if unit.backward and repeats < 1:
            for key, seconds in _regather_waits(inputs, plan, group):
                waits[key] += group.count * (1 - repeats) * seconds
        launching = group.count * _block_host_seconds(inputs, group.block)
        in_forward = FORWARD_HOST_FRACTION * launching
        host_forward += in_forward
        host_backward += launching - in_forward + in_forward * repeats if unit.backward > 0 else 0.0
    host, num_stages = job.stack.time.host, plan.num_stages // plan.mesh.pp
    if rates.cpu is not None:
        host_forward += CPU_EDGE_BLOCKS * rates.cpu.layer_us * 1e-6
    elif rates.traits.runs_async and inputs.is_captured:  # a few calls
        host_forward = host_backward = rates.host_factor * host.replay / 2
    elif rates.traits.runs_async:
        outside = rates.host_factor * (num_stages * host.micro_batch)
        host_forward, host_backward = host_forward + outside / 2, host_backward + outside / 2
    forward = sum(unit.count * unit.forward for unit in units)
    backward = sum(unit.count * unit.backward for unit in units)
    if rates.element_bytes == 2:
        backward += job.stack.time.parameter_bytes.cast * _num_cast(inputs, part) / rates.bandwidth
    near = inputs.levels[0].name
    busy = forward + backward + sum(seconds for key, seconds in waits.items() if key.endswith(near))
    root, ends = _root_unit(inputs, part)
    for key, seconds in _edge_waits(inputs, plan, part):
        waits[key] += seconds
    runs_ahead = host.runs_ahead and inputs.degrees[1] == 1 and rates.traits.runs_async
    if busy and not runs_ahead:
        # A CPU whose rates are measured computes while no operator is being started: both times add up.
        wait = host_forward + host_backward
        wait = wait if rates.cpu else host_wait(busy, wait)
        idle = wait / (forward + backward)
        forward, backward = forward * (1 + idle), backward * (1 + idle)
    forward, backward = forward + ends[0], backward + ends[1]
    seconds = forward + backward + sum(waits.values())
    hosts = host_forward, host_backward
    return StageTime(part, forward, backward, waits, (*units, root), seconds, *hosts, has_waited=not runs_ahead)


def _num_cast(inputs: StageInputs, part: RankPart) -> int:
    """Return how many parameters are cast per micro-batch: those stored in fp32.

    Of split weights, only the frozen ones, the tied ones and magnitudes are in fp32.
    """
    stored = [holding for holding in part.holdings if not holding.is_compact]
    if not inputs.splits:
        return sum(holding.parameters for holding in stored)
    frozen = sum(holding.parameters for holding in stored if not holding.is_trained)
    tied = sum(holding.root for holding in stored if holding.tower.tied and holding.is_trained)
    return frozen + tied + sum(holding.magnitudes for holding in stored)


def _unit(inputs: StageInputs, plan: Plan, group: LayerGroup) -> tuple[TimeUnit, float]:
    """Return one block of a group, and the fraction of its forward that recompute repeats with its communication."""
    job, rates, tower, block = inputs.job, inputs.rates, group.tower, group.block
    tp, is_trained, launches = job.tp_of(tower, plan), not tower.frozen, job.stack.time.host.launches
    if isinstance(block, Opaque):
        passes = opaque_passes(block, inputs.micro_batch, rates)
        num_launches = block.num_kernels / FORWARD_HOST_FRACTION if launches.eager else 0.0
        dense, experts, trained_experts = float(block.parameters), 0.0, 0.0
        trained_dense = dense * is_trained
    else:
        split, kind = _block_split(inputs, plan, group), BlockKind(inputs.is_compiled, inputs.fp8, inputs.joins)
        passes = layer_passes(block, split, rates, job.stack.time, kind=kind)
        if job.stack.name == "trimaran":  # with the copies around attention over several ranks
            forward, backward = context_copy_seconds(
                block, split.positions, rates, cp=plan.mesh.cp, tp=split.tp, context=inputs.context
            )
            passes = passes._replace(
                forward=passes.forward + forward, full=passes.full + forward, input_grad=passes.input_grad + backward
            )
        num_launches = ADAPTER_KERNELS * len(block.adapted_linears) if launches.eager else 0.0
        own = _more_launches(inputs, block)
        num_launches += own * (launches.compiled if inputs.is_compiled else launches.eager)
        dense = block.dense_weights / tp + block.router_weights + block.joining_weights + block.extras
        experts = block.expert_weights / (tp * plan.mesh.ep)
        trained_dense, trained_experts = dense * is_trained, experts * is_trained
        if block.adapter:
            trained_dense, trained_experts = float(block.adapter_parameters(tp)), 0.0
            dense = dense - sum(math.prod(linear.on_rank(tp)) for linear in packed_linears(block)) + trained_dense
    recompute, recomputing, repeated = job.recompute_of(tower, plan), 0.0, 0.0
    if recompute in RECOMPUTED_BY_OPERATOR:
        recomputing = passes.selective if recompute == "selective" else passes.elementwise
    elif recompute != "none":
        repeated = 1.0 if recompute == "full" else -(-group.count // int(recompute)) / group.count
        recomputing = repeated * passes.full
    gaps = kernel_gaps(num_launches, rates)
    backward = passes.input_grad * job.outline.has_backward(tower) + passes.weight_grad * is_trained
    backward += passes.adapter_grad
    if backward:
        backward += recomputing + (1 - FORWARD_HOST_FRACTION + FORWARD_HOST_FRACTION * repeated) * gaps
    unit = TimeUnit(
        count=group.count,
        dense=dense,
        experts=experts,
        trained_dense=trained_dense,
        trained_experts=trained_experts,
        sharding=job.sharding_of(tower, plan) if plan.towers else None,
        forward=passes.forward + FORWARD_HOST_FRACTION * gaps,
        backward=backward,
        splits_images=bool(plan.towers) and job.splits_images(tower, plan),
    )
    return unit, repeated if backward else 0.0


def _block_split(inputs: StageInputs, plan: Plan, group: LayerGroup) -> BlockSplit:
    job, mesh, block = inputs.job, plan.mesh, group.block
    is_ours = job.stack.name == "trimaran"
    operators = block.operators if isinstance(block, OutlineLayer) else None
    has_segments = group.tower.segment > 0 and not (operators and operators.biased)
    gathers, splits_sequence = inputs.context == "gather", is_ours and mesh.cp > 1
    return BlockSplit(
        positions=job.positions(group.tower, plan),
        length=group.tower.sample_positions(job.seq_len)[1],
        tp=job.tp_of(group.tower, plan),
        ep=mesh.ep,
        ampere_attention=is_ours and (has_segments or (mesh.cp > 1 and gathers)),
        ring=mesh.cp if splits_sequence and inputs.context == "ring" else 1,
        is_masked=splits_sequence and gathers and job.isolates_documents,
    )


def _more_launches(inputs: StageInputs, block: OutlineLayer) -> float:
    """Return how many times the kernels of our decoder layer a layer has. Compiled ones are assumed to have as many."""
    launches = inputs.job.stack.time.host.launches
    if block.operators is None or inputs.is_compiled or not launches.eager:
        return 1.0
    return block.operators.launches / launches.eager


def _layer_waits(inputs: StageInputs, plan: Plan, group: LayerGroup) -> Iterator[tuple[str, float]]:
    """Yield the communication of one forward of a block, by what is sent and on which link. Backward has the same.

    Tensor parallelism gathers the sequence and scatters the sum, once for attention and once for the feed-forward.
    Context parallelism gathers keys and values, receives them one rank after the other, or exchanges heads for
    positions and back. Expert parallelism sends each token to its experts and back.
    """
    layer, (tp, _, cp, ep) = group.block, inputs.degrees
    if not isinstance(layer, OutlineLayer):
        return
    element_bytes, positions = inputs.rates.element_bytes, inputs.job.positions(group.tower, plan)
    if inputs.job.tp_of(group.tower, plan) > 1:
        ring = ring_of(inputs.levels, tp, 1)
        sublayers, profile = 2 if layer.heads else 1, inputs.job.stack.time
        num_bytes = element_bytes * positions * layer.hidden
        seconds = 2 * all_gather_seconds(num_bytes, ring)
        if not profile.comm.splits_sequence:
            seconds = min(seconds, all_reduce_seconds(num_bytes, ring))
        yield f"tensor slices on {ring.link}", (1 - profile.comm.tp_overlap) * sublayers * seconds
    if cp > 1 and layer.heads:
        ring = ring_of(inputs.levels, cp, tp)
        keys = layer.kv_heads * (layer.head_dim + layer.value_dim)
        if inputs.context == "exchange":  # a key head goes to several ranks if there are fewer than ranks
            heads = (layer.heads + max(layer.kv_heads, cp * tp)) * (layer.head_dim + layer.value_dim)
            seconds = all_to_all_seconds(element_bytes * positions * heads / tp, ring)
        elif inputs.context == "ring" and inputs.job.stack.name == "trimaran":
            seconds = _ring_wait(inputs, plan, group, element_bytes * positions * keys / tp)
        else:
            seconds = all_gather_seconds(element_bytes * positions * cp * keys / tp, ring)
        yield f"parts of the sequence on {ring.link}", seconds
    if ep > 1 and layer.experts is not None:
        ring = ring_of(inputs.levels, ep, tp)
        profile = inputs.job.stack.time
        sent = profile.comm.expert_imbalance * element_bytes * positions * layer.experts.top_k * layer.hidden / tp
        crossing, nodes = 1.0, ring.num_ranks / ring.inside
        if profile.comm.sends_once_per_node:  # the fraction of a token's copies for other nodes that is sent
            crossing = (1 - (1 - 1 / nodes) ** layer.experts.top_k) * nodes / layer.experts.top_k
        yield f"experts on {ring.link}", 2 * all_to_all_seconds(sent, ring, crossing=crossing)


def _ring_wait(inputs: StageInputs, plan: Plan, group: LayerGroup, block_bytes: float) -> float:
    """Return the exposed time to receive the keys of all other ranks one by one, as the mean of forward and backward.

    The first or the last rank receives all keys of every other. They arrive beside the attention to those of the rank
    before; gradients of them are sent in backward, too. On a CPU nothing hides: the same cores send and compute.
    """
    layer, ring = group.block, ring_of(inputs.levels, inputs.degrees[2], inputs.degrees[0])
    assert isinstance(layer, OutlineLayer), "only its communication is known"
    moved = (ring.num_ranks - 1) * (ring.latency + block_bytes / ring.exchange_bandwidth)
    if inputs.rates.traits.shares_cores:
        return 1.5 * moved
    beside = layer_attention(layer, _block_split(inputs, plan, group), inputs.rates, inputs.job.stack.time)
    exposed = [max(EXPOSED_GATHER_FRACTION * seconds, seconds - hidden)
               for seconds, hidden in zip((moved, 2 * moved), beside, strict=True)]  # fmt: skip
    return sum(exposed) / 2


def _regather_waits(inputs: StageInputs, plan: Plan, group: LayerGroup) -> Iterator[tuple[str, float]]:
    """Yield the exposed time to gather a block's inputs again in its backward, if it does, with the link.

    Our recompute by operator gathers again, too; other stacks' times include what they gather in backward. Each gather
    runs beside the backward of the sublayer's last matmul, except in a compiled block, which starts it when it needs
    the result. A split backward gathers twice: for the input's gradient, and for those of the weights.
    """
    layer, job, tp = group.block, inputs.job, inputs.degrees[0]
    by_operator = job.stack.name == "trimaran" and job.recompute_of(group.tower, plan) in RECOMPUTED_BY_OPERATOR
    gathers = job.tp_of(group.tower, plan) > 1 and (inputs.regathers or by_operator)
    if not gathers or not isinstance(layer, OutlineLayer):
        return
    ring, positions = ring_of(inputs.levels, tp, 1), inputs.job.positions(group.tower, plan)
    gather = all_gather_seconds(inputs.rates.element_bytes * positions * layer.hidden, ring)
    exposed = 0.0
    for width in ([layer.heads * layer.value_dim] if layer.heads else []) + [layer.active_ffn]:
        beside = 2 * matmul_seconds(positions, layer.hidden, max(1, width // tp), inputs.rates)
        least = EXPOSED_GATHER_FRACTION * gather
        exposed += gather if inputs.is_compiled else max(least, gather - beside)
        exposed += gather if inputs.pipeline[0] == "zero-bubble" else 0.0
    yield f"tensor slices on {ring.link}", exposed


def _edge_waits(inputs: StageInputs, plan: Plan, part: RankPart) -> Iterator[tuple[str, float]]:
    """Yield a rank's communication at the ends of its stages: reductions of a split vocabulary, and stage neighbours.

    Pipeline neighbours are the most distant ranks, because all other axes lie between them.
    """
    (tp, pp, *_), main = inputs.degrees, inputs.job.outline.main
    activations = inputs.rates.element_bytes * inputs.job.positions(main, plan) * main.hidden
    if tp > 1:
        ring = ring_of(inputs.levels, tp, 1)
        ends = (part.embedding > 0) + (part.head_tower is not None)
        seconds = 2 * ends * all_gather_seconds(activations, ring)
        towers = [tower for tower in inputs.job.outline.towers if inputs.job.splits_images(tower, plan)]
        if towers and any(holding.tower is towers[-1] for holding in part.holdings):  # images were encoded separately
            rows = plan.micro_batch * towers[-1].positions
            seconds += all_gather_seconds(inputs.rates.element_bytes * rows * towers[-1].hidden, ring)
        yield f"tensor slices on {ring.link}", seconds
    if pp > 1 and not (inputs.job.stack.time.comm.overlaps_chunks and plan.num_stages > pp):
        ring = ring_of(inputs.levels, pp, max(1, inputs.levels[-1].devices // pp))
        if part.layer_groups and isinstance(last := part.layer_groups[-1].block, Opaque):
            activations = last.output_bytes * inputs.micro_batch * tp
        yield f"between stages on {ring.link}", 2 * plan.num_stages / pp * send_seconds(activations / tp, ring)


def _block_host_seconds(inputs: StageInputs, block: OutlineLayer | Opaque) -> float:
    """Return the host time to launch a block's forward and backward."""
    rates, host, (tp, pp, *_) = inputs.rates, inputs.job.stack.time.host, inputs.degrees
    if isinstance(block, Opaque):
        return rates.host_factor * block.num_kernels * KERNEL_LAUNCH_SECONDS / FORWARD_HOST_FRACTION
    if rates.cpu is not None:
        return CPU_BLOCK_OVERHEAD * rates.cpu.layer_us * 1e-6
    if not rates.traits.runs_async:
        host = TORCH_HOST
    tp_seconds = 0.0
    if tp > 1:
        tp_seconds = host.tp + (tp * host.tp_across_nodes if pp > 1 and len(inputs.levels) > 1 else 0.0)
    adapters = ADAPTER_KERNELS * KERNEL_LAUNCH_SECONDS * len(block.adapted_linears)
    own = _more_launches(inputs, block) * (host.compiled if inputs.is_compiled else host.eager)
    return rates.host_factor * (own + tp_seconds + adapters)


def _root_unit(inputs: StageInputs, part: RankPart) -> tuple[TimeUnit, tuple[float, float]]:
    """Return embedding, head and loss as a unit, and their seconds in forward and in backward.

    A fused loss computes its gradients in forward. They are still reduced with those of the blocks, so the unit can
    hide as much communication as with full logits.
    """
    weights = float(part.root)
    trained = float(sum(holding.root for holding in part.holdings if holding.is_trained))
    if (tower := part.head_tower) is None:
        return TimeUnit(1, weights, 0.0, trained, 0.0, None, 0.0, 0.0), (0.0, 0.0)
    positions = inputs.micro_batch * tower.sample_positions(inputs.job.seq_len)[0] // inputs.degrees[2]
    positions *= 1 + tower.prediction_layers  # each uses the head once more
    split, loss = BlockSplit(positions, 0, inputs.degrees[0], 1), inputs.loss
    passes = head_passes(tower, split, inputs.rates, inputs.job.stack.time)
    ends = passes.forward, passes.input_grad + passes.weight_grad * tower.is_head_trained
    unit = TimeUnit(1, weights, 0.0, trained, 0.0, None, *ends)
    if loss != "logits":
        fused = fused_passes(tower, split, inputs.rates, chunked=loss == "chunked")
        ends = fused.forward + fused.weight_grad * tower.is_head_trained, fused.input_grad
    gaps = kernel_gaps(inputs.job.stack.time.host.launches.micro_batch, inputs.rates)
    return unit, (ends[0] + gaps / 2, ends[1] + gaps / 2)

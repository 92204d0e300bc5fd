"""Peak memory of a rank: all terms at the moment of a step when they add up to the most."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from trimaran.core import Bytes, Plan
from trimaran.cost.activation_memory import saved_on_rank
from trimaran.cost.job import FP32_BYTES, Job, MemoryInputs, chunk_rows, loss_of, memory_inputs_of
from trimaran.cost.rank_part import RankPart, distinct_parts, parts_of
from trimaran.cost.states import PINNED_OVERHEAD, States, states_of
from trimaran.machine import Cluster

# glibc's heap fragments: resident memory grows by 1.6 bytes for each byte of activations (1.0 with mmap alone).
HEAP_OVERHEAD = 0.6
# A Python interpreter with torch, its loaded kernels, and the trainer.
PROCESS_BYTES = 330 * 2**20
# cuBLAS workspaces come from torch's allocator: 32 MiB each for the forward and the backward thread.
WORKSPACE_BYTES = 2 * 2**25
# Unused space in the allocator's segments, however small the temporary tensors are.
SEGMENT_BYTES = 2**28
EARLY_MESSAGES = 2  # that a pipeline's rank receives of each neighbour before it needs them, at most. Assumed.
CPU_SPLIT_LOGIT_BYTES = 10  # per logit of our loss of a split vocabulary: fp32 logits and exponentials beside 16 bits
# Memory outside the allocator, so not part of the peak: a CUDA context with cuBLAS (0.92 GiB on an H200; BigScience saw
# 1.1 on V100, 1.5 on A100), and NCCL's buffers per process group. The latter is a guess: runs with two groups had
# 2 GiB for all of it, and ran.
CONTEXT_BYTES = 15 * 2**26
COMMUNICATOR_BYTES = 3 * 2**27
# The same for CUDA graphs: the kernels with their arguments. Assumed.
GRAPH_BYTES = 2**25


class Memory(NamedTuple):
    """Bytes of one rank."""

    terms: dict[str, Bytes]  # add up to `peak`, the figure that the stack's own log would show
    peak: Bytes
    reserved: Bytes  # of the fullest rank, by its allocator
    device: Bytes  # of the fullest rank, in total
    host: Bytes  # of one node, for offloaded tensors
    disk: Bytes = Bytes(0)  # the same in files
    runs: bool = True  # False if a pipeline rank would have no layers, or if the stack rejects so few micro-batches


class PeakMoment(NamedTuple):
    """Temporary bytes at the moment of the peak. The field names are the term names of a prediction."""

    activations: float = 0
    logits: float = 0
    casts: float = 0
    gathered: float = 0
    gradients: float = 0
    update: float = 0


class RankLoad(NamedTuple):
    """A rank at its peak: bytes of its tensors, and bytes its allocator reserves for them, typically and at worst."""

    states: States
    moment: PeakMoment
    peak: float
    reserved: float
    worst: float
    host: float


def peak_memory_of(job: Job, cluster: Cluster, plan: Plan) -> Memory:
    """Return the memory that the plan needs at the peak of a step."""
    inputs = memory_inputs_of(job, cluster, plan)
    gathered = inputs.profile.gathered_input_bytes[0] if inputs.tp > 1 and inputs.pp == 1 else 0
    memory = _memory(inputs, cluster, gathered)
    if gathered and memory.device > cluster.device.memory_bytes:
        return _memory(inputs, cluster)  # users switch on gathering again when memory runs out
    return memory


def rank_memory_of(job: Job, cluster: Cluster, plan: Plan, pp_rank: int) -> tuple[dict[str, Bytes], Bytes]:
    """Return the bytes of one pipeline rank's tensors at its peak, by term, and what its allocator reserves.

    These are tensors alone: not the process and its heap, which are part of the peak that a CPU reports.
    """
    inputs = memory_inputs_of(job, cluster, plan)
    part = parts_of(job.outline, plan, seq_len=job.seq_len, split=inputs.profile.split)[pp_rank]
    load = _load(inputs, part, 0)
    terms = {name: size for name, size in _terms(inputs, load, "peak").items() if name not in ("heap", "process")}
    return terms, Bytes(0 if inputs.cpu else int(load.reserved))


def stage_memory_of(job: Job, cluster: Cluster, plan: Plan, pp_rank: int) -> Memory:
    """Return the memory that one pipeline rank needs at the peak of a step."""
    inputs = memory_inputs_of(job, cluster, plan)
    part = parts_of(job.outline, plan, seq_len=job.seq_len, split=inputs.profile.split)[pp_rank]
    return _memory(inputs, cluster, only=(part,))


def _memory(
    inputs: MemoryInputs, cluster: Cluster, gathered: float = 0, only: Sequence[RankPart] | None = None
) -> Memory:
    """Return the memory of all ranks, or of those with `only` these parts."""
    parts, runs = distinct_parts(inputs.job.outline, inputs.plan, inputs.job.seq_len, inputs.profile.split)
    parts = parts if only is None else only
    loads = [_load(inputs, part, gathered) for part in parts]
    fullest = max(loads, key=attrgetter("worst"))
    rank, figure = inputs.profile.logged
    terms = _terms(inputs, fullest if rank == "fullest" else loads[0 if rank == "first" else -1], figure)
    outside = 0
    if not inputs.cpu:
        groups = (inputs.tp > 1) + (inputs.pp > 1) + (inputs.data > 1)
        outside = CONTEXT_BYTES + COMMUNICATOR_BYTES * (1 + groups if groups else 0)
        outside += GRAPH_BYTES * inputs.is_captured
    return Memory(
        terms=terms,
        peak=Bytes(sum(terms.values())),
        reserved=Bytes(int(fullest.reserved)),
        device=Bytes(int(fullest.worst) + outside),
        host=Bytes(int(cluster.devices_per_node * max(load.host for load in loads))),
        disk=Bytes(int(cluster.devices_per_node * max(load.states.disk for load in loads))),
        runs=runs,
    )


def _terms(inputs: MemoryInputs, load: RankLoad, figure: str) -> dict[str, Bytes]:
    """Return the bytes by term. On a CPU the peak is resident memory, with the process and its heap's fragmentation."""
    states, moment = load.states, load.moment
    terms = {"weights": states.weights, "masters": states.masters, "optimizer": states.optimizer} | moment._asdict()
    if inputs.cpu:
        terms |= {"heap": HEAP_OVERHEAD * (moment.activations + moment.logits), "process": PROCESS_BYTES}
    else:
        terms |= {"workspace": WORKSPACE_BYTES, "holes": load.reserved - load.peak if figure == "reserved" else 0}
    return {name: Bytes(int(size)) for name, size in terms.items() if size >= 1}


def _load(inputs: MemoryInputs, part: RankPart, gathered: float) -> RankLoad:
    """Return the rank's memory at its peak.

    The peak is one of six moments: the loss of the last micro-batch, when all activations are alive; the first layer
    of backward; the last layer of backward, when all gradients exist; the reduction of a unit's gradients; the addition
    of the last gradient; the update.
    """
    states, saved, in_flight = states_of(inputs, part), saved_on_rank(inputs, part, gathered=gathered), part.in_flight
    head, casts, host = head_memory(inputs, part), saved.casts, states.host
    job, plan = inputs.job, inputs.plan
    rounds = max(1, plan.num_stages // inputs.pp)  # the stages of the rank
    in_pipeline = pipeline_casts = 0.0
    if inputs.pp > 1 and job.stack.name == "trimaran" and inputs.offload != "activations":
        # Messages that it receives, and, until its backward, what it sent.
        main = job.outline.main
        message = job.positions(main, plan) * inputs.element_bytes * main.hidden / inputs.tp
        num_sent = part.in_flight * (rounds - (part.head_tower is not None))
        in_pipeline = (EARLY_MESSAGES * part.received + num_sent) * message + part.deferred * saved.deferred
        # 16-bit copies of weights, which all micro-batches share, and the gradients of those of one stage. They are
        # added to the weights' own only after all of its layers.
        pipeline_casts = 0.0 if plan.compile or inputs.cpu else saved.casts * (1 + 1 / rounds)
    alive = saved.layers * in_flight + in_pipeline
    others = saved.layers * max(0, in_flight - 1 / rounds) + in_pipeline
    if inputs.offload == "activations":  # only the current layer's activations are on the device
        host, alive, others, casts = host + PINNED_OVERHEAD * alive, saved.one_layer, saved.one_layer, 0
    at_loss, cast = alive + head.activations + saved.exchanged, casts + head.casts
    unpacked = inputs.element_bytes * max((holding.largest_packed for holding in part.holdings), default=0)
    current = saved.recomputed + saved.backward + saved.exchanged
    later = saved.recomputed - saved.at_recompute
    left = head.gradients
    if states.gathered_in_backward:  # it already includes the gradients of a sharded root
        left = 0
    elif inputs.splits_weights and part.head_tower is not None and not part.head_tower.tied:  # no fp32 sum is kept
        left = min(left, inputs.element_bytes * part.head_tower.head_parameters)
    reduced = states.gradients - states.unreduced
    moment = max(
        (at_loss, head.logits, cast, states.gathered_at_loss, states.gradients_at_loss + head.gradients, 0),
        (alive + current - later, 0, cast + unpacked, states.gathered_in_backward, states.gradients_at_loss + left, 0),
        (others + current, 0, pipeline_casts + unpacked, states.gathered_in_backward, reduced, 0),
        (others, 0, pipeline_casts, states.gathered_in_reduction, reduced, 0),
        (others, 0, pipeline_casts, 0, states.gradients + states.duplicate_gradients, 0),
        (0, 0, 0, 0, states.gradients, states.update),
        key=sum,
    )
    moment = PeakMoment(*moment)
    peak = states.weights + states.masters + states.optimizer + sum(moment)
    temporary = moment.activations + moment.logits
    if inputs.cpu:
        peak += HEAP_OVERHEAD * temporary + PROCESS_BYTES
        return RankLoad(states, moment, peak, peak, peak, host)
    peak += WORKSPACE_BYTES
    unsharded, sharded, worst = inputs.profile.fragmentation
    typical = unsharded if inputs.shards == 1 else sharded
    temporary += moment.casts + moment.gathered
    # The pool of CUDA graphs keeps what forward and backward need, so the update cannot use it.
    reserved = peak + SEGMENT_BYTES + (states.update - moment.update if inputs.is_captured else 0)
    worst = typical if inputs.pp * inputs.tp * inputs.data == 1 else max(typical, worst)
    return RankLoad(states, moment, peak, reserved + typical * temporary, reserved + worst * temporary, host)


def head_memory(inputs: MemoryInputs, part: RankPart) -> PeakMoment:
    """Return what the last norm and the head save, and the logits while the loss is computed.

    GPipe holds the logits of all micro-batches. Tensor parallelism splits the vocabulary. A fused loss computes the
    gradients of head and input at once and saves nothing for backward. Layers that predict later tokens have logits, or
    such gradients, of their own.
    """
    if (tower := part.head_tower) is None:
        return PeakMoment()
    positions, plan = inputs.job.positions(tower, inputs.plan) / inputs.tp, inputs.plan
    element_bytes = inputs.element_bytes
    is_fp32 = inputs.profile.weight_bytes == 4 or (inputs.splits_weights and (tower.tied or tower.frozen))
    is_fp32 = is_fp32 and (not tower.compact or tower.trains_head)
    casts = element_bytes == 2 and is_fp32 and inputs.job.sharding_of(tower, plan) == "none"
    memory = PeakMoment(
        activations=positions * inputs.saved.norm_bytes * tower.hidden,
        casts=2 * tower.head_rows(inputs.tp) * tower.hidden if casts else 0,
    )
    if (loss := loss_of(inputs.job, plan)) != "logits":
        # All logits, or those of one chunk. On a CPU, without our kernel, an fp32 copy lies beside them.
        rows = inputs.job.positions(tower, plan)
        at_once = chunk_rows(rows, tower.outputs, element_bytes) if loss == "chunked" else rows
        gradient_bytes = FP32_BYTES if loss == "chunked" and at_once < rows else element_bytes
        weight = gradient_bytes * tower.head_parameters if tower.is_head_trained else 0
        return memory._replace(
            logits=(element_bytes + FP32_BYTES * inputs.cpu) * at_once * tower.outputs,
            gradients=(1 + tower.prediction_layers) * (element_bytes * rows * tower.hidden + weight),
        )
    whole, waiting, split = inputs.profile.logit_bytes
    at_loss = split if inputs.tp > 1 else whole
    if inputs.tp > 1 and not split:  # our kernels; a CPU computes in fp32
        at_loss, waiting = (CPU_SPLIT_LOGIT_BYTES, waiting) if inputs.cpu else (2 * element_bytes, element_bytes)
    if inputs.pp > 1 and plan.pipeline.schedule == "gpipe":
        at_loss += (plan.grad_accum - 1) * waiting
    logits = positions * inputs.tp * at_loss * tower.head_rows(inputs.tp) * (1 + tower.prediction_layers)
    if inputs.tp > 1 and casts and plan.grad_accum > 1:  # a new gradient of the head, in both precisions, and the sum
        logits = max(logits, (element_bytes + FP32_BYTES) * tower.head_rows(inputs.tp) * tower.hidden)
    return memory._replace(logits=logits)

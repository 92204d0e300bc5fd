"""What a plan costs: the bytes of a rank at its fullest and the seconds of a step, term by term."""

import math

from trimaran.core import Bytes, Plan, Prediction, Seconds
from trimaran.cost import memory
from trimaran.cost.collective import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds, ring_of
from trimaran.cost.compute import WEIGHTS_PER_LAYER, backward_work, forward_seconds, forward_work, update_seconds
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec

# The share of a backward behind which a collective can hide. Gloo's threads need the cores that compute.
OVERLAP = {"cuda": 0.8, "cpu": 0.0}
# What computing gets longer because all wait for the slowest, for each doubling of the nodes, or of the ranks that
# share one machine's cores with all else that runs there.
SLOWEST_SHARE = {"cuda": 0.02, "cpu": 0.15}
# Half-width to expect: measured for one device, not yet for many.
ERROR = {"one": 0.2, "many": 0.3}


def predict(spec: ModelSpec, cluster: Cluster, plan: Plan, *, seq_len: int) -> Prediction:
    """Return what one optimizer step of `plan` needs on each rank of `cluster`. The plan must be legal.

    `peak_bytes` is what the tensors of one rank hold (on a CPU: resident memory), and the memory terms add up to it;
    the time terms add up to `step_seconds`. Tokens a second and flops are of the whole cluster.
    """
    device = cluster.device
    bytes_by_term = memory.peak_terms(spec, plan, kind=device.kind, seq_len=seq_len)
    peak = Bytes(sum(bytes_by_term.values()))
    reserved = memory.reserved_bytes(peak, plan, kind=device.kind)
    needed = memory.needed_bytes(reserved, plan, kind=device.kind)

    seconds_by_term = step_terms(spec, cluster, plan, seq_len=seq_len)
    seconds = Seconds(sum(seconds_by_term.values()))

    tokens = plan.global_batch * seq_len
    flops = spec.flops_per_token(seq_len) * tokens
    peak_flops = device.peak(plan.precision)
    return Prediction(
        fits=needed <= device.memory_bytes,
        peak_bytes=peak,
        reserved_bytes=reserved,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops / (seconds * peak_flops * cluster.world_size),
        flops_per_step=flops,
        device_peak_flops=peak_flops,
        memory=bytes_by_term,
        time=seconds_by_term,
        error=ERROR["many" if cluster.world_size > 1 or device.kind == "cpu" else "one"],
        source=f"{device.name} at {device.achievable_flops(plan.precision) / 1e12:.3g} TFLOP/s: {device.note}",
    )


def step_terms(spec: ModelSpec, cluster: Cluster, plan: Plan, *, seq_len: int) -> dict[str, Seconds]:
    """Return the seconds of a step by phase, as the trainer names them; `comm` is what computing does not hide."""
    work = forward_work(spec, plan, seq_len=seq_len)
    device, precision = cluster.device, plan.precision
    forward = forward_seconds(work, device, precision=precision, width=spec.hidden)
    backward = forward_seconds(backward_work(work), device, precision=precision, width=spec.hidden)
    computing = plan.grad_accum * (forward + backward)
    exposed = _exposed_seconds(spec, cluster, plan, forward=forward, backward=backward)
    return {
        "forward": Seconds(plan.grad_accum * forward),
        "backward": Seconds(plan.grad_accum * backward),
        "comm": Seconds(exposed + computing * _slowest_share(cluster)),
        "optimizer": update_seconds(
            memory.weights(spec, plan) // 4, device, num_weights=spec.layers * WEIGHTS_PER_LAYER
        ),
    }


def _exposed_seconds(spec: ModelSpec, cluster: Cluster, plan: Plan, *, forward: Seconds, backward: Seconds) -> Seconds:
    """Return the communication of a step that no computing hides.

    Shards gather their weights for every forward and backward, layer by layer; gradients travel once, with the last
    backward, across the shards and then across the replicas. The first gather and the last bucket hide behind nothing.
    """
    shards = ring_of(cluster, num_ranks=plan.mesh.dp_shard, stride=1)
    replicas = ring_of(cluster, num_ranks=plan.mesh.dp_replicate, stride=plan.mesh.dp_shard)
    overlap = OVERLAP[cluster.device.kind]
    gradient_bytes = 4 * spec.num_parameters
    if plan.sharding != "parameters":
        buckets = math.ceil(gradient_bytes / (plan.comm.bucket_mb * 2**20))
        bucket = all_reduce_seconds(Bytes(gradient_bytes // buckets), replicas)
        return Seconds(max(buckets * bucket - overlap * backward, bucket))
    units = spec.layers + 1  # and the root: embedding, last norm and head
    weight_bytes = memory.WIDTH[plan.precision] * spec.num_parameters
    unit = all_gather_seconds(Bytes(weight_bytes // units), shards)
    reduce = reduce_scatter_seconds(Bytes(gradient_bytes // units), shards)
    reduce += all_reduce_seconds(Bytes(gradient_bytes // units // plan.mesh.dp_shard), replicas)
    forwards = plan.grad_accum * max(units * unit - overlap * forward, unit)
    backwards = (plan.grad_accum - 1) * max(units * unit - overlap * backward, 0)
    return Seconds(forwards + backwards + max(units * (unit + reduce) - overlap * backward, reduce))


def _slowest_share(cluster: Cluster) -> float:
    jitters = cluster.world_size if cluster.device.kind == "cpu" else cluster.num_nodes
    return SLOWEST_SHARE[cluster.device.kind] * math.log2(jitters)

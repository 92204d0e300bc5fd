"""What a plan costs: the bytes of a rank at its fullest and the seconds of a step, term by term."""

import math
from typing import NamedTuple

from trimaran.core import Bytes, Plan, Prediction, Seconds
from trimaran.cost import memory
from trimaran.cost.compute import (
    RATE,
    UPDATE_BYTES,
    WEIGHTS_PER_LAYER,
    Work,
    backward_work,
    forward_seconds,
    forward_work,
    recompute_work,
    update_seconds,
)
from trimaran.cost.pipeline import Part, distinct_parts
from trimaran.cost.traffic import OVERLAP, exposed_seconds, micro_batch_seconds
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec

# What computing gets longer because all wait for the slowest, for each doubling of the nodes, or of the ranks that
# share one machine's cores with all else that runs there.
SLOWEST_SHARE = {"cuda": 0.02, "cpu": 0.15}
# Half-width to expect: measured for one device, not yet for many.
ERROR = {"one": 0.2, "many": 0.3}
# What an optimizer on the host streams of its memory, all ranks of a node together: a guess.
HOST_BANDWIDTH = 100e9


def predict(
    spec: ModelSpec, cluster: Cluster, plan: Plan, *, seq_len: int, state_bytes: float = memory.STATE_BYTES["fp32"]
) -> Prediction:
    """Return what one optimizer step of `plan` needs on each rank of `cluster`. The plan must be legal.

    `peak_bytes` is what the tensors of one rank hold (on a CPU: resident memory), and the memory terms add up to it;
    the time terms add up to `step_seconds`. Tokens a second and flops are of the whole cluster. `state_bytes` is what
    the optimizer keeps for each parameter.
    """
    device, precision = cluster.device, RATE.get(plan.precision, plan.precision)
    bytes_by_term = memory.peak_terms(spec, plan, kind=device.kind, seq_len=seq_len, state_bytes=state_bytes)
    peak = Bytes(sum(bytes_by_term.values()))
    reserved = memory.reserved_bytes(peak, plan, kind=device.kind)
    needed = memory.needed_bytes(reserved, plan, kind=device.kind)

    seconds_by_term = step_terms(spec, cluster, plan, seq_len=seq_len, state_bytes=state_bytes)
    seconds = Seconds(sum(seconds_by_term.values()))

    tokens = plan.global_batch * seq_len
    flops = spec.flops_per_token(seq_len) * tokens
    peak_flops = device.peak(precision)
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
        source=f"{device.name} at {device.achievable_flops(precision) / 1e12:.3g} TFLOP/s: {device.note}",
    )


class Pace(NamedTuple):
    """How long a rank computes for one micro-batch."""

    part: Part
    forward: Seconds
    backward: Seconds


def step_terms(
    spec: ModelSpec, cluster: Cluster, plan: Plan, *, seq_len: int, state_bytes: float
) -> dict[str, Seconds]:
    """Return the seconds of a step by phase, as the trainer names them; `comm` is what computing does not hide.

    Of a pipeline these are the seconds of the busiest rank, for which all others wait. What it waits itself while the
    pipeline fills and drains is `bubble`; what moves to the host and back, and nothing hides, is `offload`.
    """
    parts = distinct_parts(spec, plan, seq_len=seq_len)
    paces = [_pace(spec, cluster, plan, part, seq_len=seq_len) for part in parts]
    part, forward, backward = max(paces, key=lambda pace: pace.forward + pace.backward)
    computing = plan.grad_accum * (forward + backward)
    talking = plan.grad_accum * micro_batch_seconds(spec, cluster, plan, part, seq_len=seq_len)
    exposed = exposed_seconds(cluster, plan, part, forward=forward, backward=backward)
    moved = _offload_seconds(spec, cluster, plan, part, seq_len=seq_len, state_bytes=state_bytes)
    hidden = 0.0 if plan.offload == "optimizer" else OVERLAP[cluster.device.kind] * computing
    terms = {
        "forward": plan.grad_accum * forward,
        "backward": plan.grad_accum * backward,
        "comm": talking + exposed + computing * _slowest_share(cluster),
        "bubble": (computing + talking) * plan.bubble / (1 - plan.bubble),
        "offload": max(moved - hidden, 0.0),
        "optimizer": _update_seconds(cluster, plan, part),
    }
    always = ("forward", "backward", "comm", "optimizer")
    return {term: Seconds(num) for term, num in terms.items() if num or term in always}


def _pace(spec: ModelSpec, cluster: Cluster, plan: Plan, part: Part, *, seq_len: int) -> Pace:
    work = forward_work(spec, plan, part, seq_len=seq_len)

    def seconds(work: Work) -> Seconds:
        return forward_seconds(work, cluster.device, precision=plan.precision, width=spec.hidden // plan.mesh.tp)

    backward = seconds(backward_work(work))
    if plan.recompute != "none":
        backward = Seconds(backward + seconds(recompute_work(spec, plan, part, work)))
    return Pace(part, seconds(work), backward)


def _update_seconds(cluster: Cluster, plan: Plan, part: Part) -> Seconds:
    """Return how long the update takes, on the host for parameters that live there."""
    owned = memory.owned_parameters(plan, part)
    if plan.offload == "parameters" and cluster.device.kind == "cuda":
        return Seconds(UPDATE_BYTES * owned * cluster.devices_per_node / HOST_BANDWIDTH)
    return update_seconds(owned, cluster.device, num_weights=part.layers * WEIGHTS_PER_LAYER)


def _offload_seconds(
    spec: ModelSpec, cluster: Cluster, plan: Plan, part: Part, *, seq_len: int, state_bytes: float
) -> Seconds:
    """Return how long a step's traffic between device and host takes; none on a CPU.

    Both directions run at once: states come and go while the update runs, and weights come (for each gather) while
    gradients go. Activations go in forward and come back in backward.
    """
    if cluster.device.kind == "cpu":
        return Seconds(0.0)
    owned, count = memory.owned_parameters(plan, part), plan.grad_accum
    match plan.offload:
        case "none":
            moved = 0.0
        case "optimizer":
            moved = state_bytes * owned
        case "parameters":
            moved = 4.0 * owned * (2 * count if memory.frees_weights(plan) else 1)
        case "activations":
            per_token = memory.saved_by_layers(spec, plan, part, kind=cluster.device.kind)
            moved = 2.0 * count * memory.local_tokens(plan, seq_len) * per_token
    return Seconds(moved / cluster.device.pcie_bandwidth)


def _slowest_share(cluster: Cluster) -> float:
    jitters = cluster.world_size if cluster.device.kind == "cpu" else cluster.num_nodes
    return SLOWEST_SHARE[cluster.device.kind] * math.log2(jitters)

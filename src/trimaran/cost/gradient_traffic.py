"""Communication of weights and gradients between data ranks, and how much of it compute does not hide."""

import math
from typing import NamedTuple

from trimaran.core import FP32_BYTES, Plan, compressed_bytes, synchronisation_bytes
from trimaran.cost.collective import (
    RING_EFFICIENCY,
    Ring,
    all_gather_seconds,
    all_reduce_seconds,
    ring_of,
    slow_start_seconds,
)
from trimaran.cost.job import Job, frees_weights, gathers_fp8
from trimaran.cost.roofline import DeviceRates, rates_for
from trimaran.cost.stage_time import StageTime, TimeUnit, levels_of
from trimaran.machine import Cluster, Link

# How much a collective on NVLink slows down the matmuls that run at the same time, as a fraction of its own time: it
# takes multiprocessors, memory bandwidth and power. Fitted to llm-foundry's A100 runs. A network takes less.
COLLECTIVE_SLOWDOWN = 0.43
# Gradients that are summed after backward: bytes of each all-reduce (`parallel.comm.gradient_buckets`), and bytes moved
# per parameter to clear the sums (4), to add the gradients of the first micro-batch (12) and to average them (8).
LATE_BUCKET_BYTES, LATE_MOVED_BYTES = 256 << 20, 24
# Bytes that FSDP moves on the device around its collectives while nothing else computes, per parameter: to copy
# gathered weights into place, in forward and in backward; and besides, for embedding and head, whose gather comes
# before the first layer, and whose gradients are reduced after the last. Fitted to 12 rehearsed plans of 1B to 70B on
# one H200.
COPIED_BYTES, COPIED_ROOT_BYTES = 13.0, 14.5


class Rings(NamedTuple):
    """The rings of some parameters: over their shards, and over the replicas of one shard."""

    shards: Ring
    replicas: Ring


class TrafficPath(NamedTuple):
    """How weights and gradients are sent: the rings, the bytes per element, and how much of compute can hide it.

    overlap_fraction: of the compute of a block's passes. If the stages of a rank take turns, it computes
        `num_windows` such passes of others between two of a block's.
    """

    dense: Rings
    experts: Rings
    images: Rings  # of parameters whose shards tensor-parallel ranks hold, too
    weight_bytes: float
    gradient_bytes: float
    replica_bytes: float  # of a gradient between replicas; 0 if they exchange weights every few steps (`outer_seconds`)
    overlap_fraction: float
    near_bandwidth: float
    num_windows: int = 1


def traffic_path_of(levels: tuple[Link, ...], plan: Plan, rates: DeviceRates, job: Job) -> TrafficPath:
    """Return the path of a plan. On a CPU nothing overlaps, because Gloo's threads need the cores that compute."""
    mesh, is_sharded, profile = plan.mesh, plan.sharding != "none", job.stack.time
    fraction = 1.0  # of the gradient: the size of an all-reduce that takes as long as the compressed one
    if plan.comm.compression != "none":
        fraction = compressed_bytes(plan.comm.compression, 1.0) / FP32_BYTES
        # What every rank receives from each other one goes around once per rank; an all-reduce goes around twice.
        fraction = fraction * (mesh.data / 2 if plan.comm.compression_settings.is_gathered else 1.0)
    gradient_bytes = profile.parameter_bytes.gradient * fraction
    if is_sharded:
        shards = max(1, mesh.expert_ranks // mesh.ep)
        dense, spread = (mesh.shards, mesh.dp_replicate), (shards, max(1, mesh.data // (shards * mesh.ep)))
    else:
        dense, spread = (1, mesh.data), (1, max(1, mesh.data // mesh.ep))
    return TrafficPath(
        _rings(levels, mesh.tp, *dense, profile.comm.hops),
        _rings(levels, mesh.tp * mesh.ep, *spread, profile.comm.hops),
        _rings(levels, 1, mesh.tp * mesh.shards, mesh.dp_replicate, profile.comm.hops),
        1 if gathers_fp8(job, plan) else rates.element_bytes,
        gradient_bytes,
        0.0 if plan.comm.local.is_on else gradient_bytes,
        0.0 if rates.traits.shares_cores else profile.dp_overlap[is_sharded],
        RING_EFFICIENCY * levels[0].bandwidth,
        mesh.pp if profile.comm.overlaps_chunks and plan.num_stages > mesh.pp else 1,
    )


def traffic_path_on(job: Job, cluster: Cluster, plan: Plan) -> TrafficPath:
    """Return the path of a plan on a cluster."""
    return traffic_path_of(levels_of(cluster), plan, rates_for(job, cluster, plan), job)


def exposed_traffic(path: TrafficPath, plan: Plan, stage: StageTime) -> dict[str, float]:
    """Return the exposed communication seconds of a step, by what is sent and on which link.

    Replicas reduce once, in the last backward. Shards gather their weights block by block: for every forward and
    backward if weights are freed in between, else once per step. Sharded gradients are reduced in every backward,
    unsharded ones and those of a pipeline in the last. Nothing hides the first gather and the last reduction.
    """
    if plan.reduces_after_backward:
        if not path.replica_bytes:
            return {}
        # All-reduces of replicas after backward. Nothing hides them, and they slow down nothing.
        trained = sum(unit.count * (unit.trained_dense + unit.trained_experts) for unit in stage.units)
        num_bytes, ring = path.replica_bytes * trained, path.dense.replicas
        count = max(1, math.ceil(num_bytes / LATE_BUCKET_BYTES))
        return {f"gradients on {ring.link}": count * all_reduce_seconds(num_bytes / count, ring)}
    gathers = reductions = hidden = 0.0
    count, fraction = plan.grad_accum, path.overlap_fraction * path.num_windows
    for unit in stage.units:
        sharding = unit.sharding or plan.sharding
        gather, reduce = unit_seconds(path, unit, sharding)
        is_freed = frees_weights(plan, sharding)
        regather = gather if is_freed else 0.0
        not_last = regather + reduce if sharding in ("gradients", "parameters") and plan.mesh.pp == 1 else regather
        # Transfers: how often in a step, how long, and the compute that hides it. In forward, in the last backward, and
        # in the other ones.
        times, window = (count if is_freed else 1) * unit.count, fraction * unit.forward
        hidden += times * min(gather, window)
        gathers += times * max(0.0, gather - window)
        window = fraction * unit.backward
        in_backward = (unit.count, regather + reduce), ((count - 1) * unit.count, not_last)
        for times, seconds in in_backward:
            hidden += times * min(seconds, window)
        reductions += sum(times * max(0.0, seconds - window) for times, seconds in in_backward)
    if path.overlap_fraction:
        first = stage.units[0]
        gather, reduce = unit_seconds(path, first, first.sharding or plan.sharding)
        gathers, reductions = gathers + gather, reductions + min(reduce, path.overlap_fraction * first.backward)
    replicas, shards = path.dense.replicas, path.dense.shards
    ring = replicas if replicas.num_ranks > 1 else shards
    relative_bandwidth = min(1.0, ring.gather_bandwidth / path.near_bandwidth)
    exposed = {
        f"all-gather of weights on {shards.link}": gathers,
        f"gradients on {ring.link}": reductions,
        "computing slowed by collectives": COLLECTIVE_SLOWDOWN * relative_bandwidth * hidden,
    }
    return {key: seconds for key, seconds in exposed.items() if seconds}


def copy_seconds(job: Job, plan: Plan, stage: StageTime, rates: DeviceRates) -> float:
    """Return the time of a step in which our FSDP only copies gathered weights and reduced gradients; 0 on a CPU."""
    if plan.sharding == "none" or not rates.traits.has_own_memory or job.stack.name != "trimaran":
        return 0.0
    *blocks, root = stage.units
    sharded = [unit for unit in (*blocks, root) if (unit.sharding or plan.sharding) != "none"]
    times = plan.grad_accum if frees_weights(plan, plan.sharding) else 1
    moved = times * COPIED_BYTES * sum(unit.count * (unit.dense + unit.experts) for unit in sharded)
    return (moved + COPIED_ROOT_BYTES * root.dense) / rates.bandwidth


def unit_seconds(path: TrafficPath, unit: TimeUnit, sharding: str) -> tuple[float, float]:
    """Return the time to gather the weights of one unit, and the time to reduce its gradients."""
    gather = reduce = 0.0
    spans_tp = unit.splits_images and sharding != "none"
    for num, trained, (shards, replicas) in (
        (unit.dense, unit.trained_dense, path.images if spans_tp else path.dense),
        (unit.experts, unit.trained_experts, path.experts),
    ):
        if num and sharding != "none":
            gather += all_gather_seconds(path.weight_bytes * num, shards)
        if trained:
            rounds = 2 if sharding == "none" else 1  # an unsharded tower also gathers its reduced gradients
            reduce += rounds * all_gather_seconds(path.gradient_bytes * trained, shards)
            if path.replica_bytes:
                reduce += all_reduce_seconds(path.replica_bytes * trained / shards.num_ranks, replicas)
    return gather, reduce


def outer_seconds(path: TrafficPath, plan: Plan, stage: StageTime) -> float:
    """Return the time that replicas with local steps take to exchange all their weights once, fragment by fragment.

    Parameters outside of blocks are one exchange more, which is small. On TCP each exchange begins with a small window.
    """
    local, ring = plan.comm.local, path.dense.replicas
    trained = sum(unit.count * (unit.trained_dense + unit.trained_experts) for unit in stage.units)
    of_fragment = trained / path.dense.shards.num_ranks / local.fragments
    sent = synchronisation_bytes(local, of_fragment, ring.num_ranks)
    begin = local.fragments * slow_start_seconds(sent / 2, ring) if local.steps > 1 else 0.0
    if local.compression == "none":
        outside = all_reduce_seconds(0.0, ring)
        return begin + outside + local.fragments * all_reduce_seconds(FP32_BYTES * of_fragment, ring)
    # Sparse values are gathered from all; others are exchanged, summed, and then gathered.
    rounds = 1 if local.compression == "sparse" else 2
    hops, outside = max(1, ring.num_ranks - 1), rounds * all_gather_seconds(0.0, ring)
    of_values = all_gather_seconds(sent / rounds * ring.num_ranks / hops, ring)
    return begin + outside + local.fragments * rounds * of_values


def _rings(levels: tuple[Link, ...], stride: int, shards: int, replicas: int, hops: str) -> Rings:
    return Rings(ring_of(levels, shards, stride, hops), ring_of(levels, replicas, stride * shards, hops))

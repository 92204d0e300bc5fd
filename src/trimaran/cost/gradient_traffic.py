"""Communication of weights and gradients between data ranks, and how much of it compute does not hide."""

from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.collective import RING_EFFICIENCY, Ring, all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.cost.job import frees_weights
from trimaran.cost.roofline import DeviceRates
from trimaran.cost.stage_time import StageTime, TimeUnit
from trimaran.cost.time_profiles import TimeProfile
from trimaran.hardware import Link

# How much a collective on NVLink slows down the matmuls that run at the same time, as a fraction of its own time: it
# takes multiprocessors, memory bandwidth and power. Fitted to llm-foundry's A100 runs. A network takes less.
COLLECTIVE_SLOWDOWN = 0.43
# Fraction of a gradient's bytes that is sent. PowerSGD: two factors of rank 4 of a 4096 x 4096 weight. Top-k: one value
# in a hundred, with an index of 8 bytes.
COMPRESSED_FRACTION = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 0.002, "topk": 0.03}


class Rings(NamedTuple):
    """The rings of some parameters: over their shards, and over the replicas of one shard."""

    shards: Ring
    replicas: Ring


class TrafficPath(NamedTuple):
    """How weights and gradients are sent: the rings, the bytes per element, and how much of compute can hide it."""

    dense: Rings
    experts: Rings
    weight_bytes: float
    gradient_bytes: float
    overlap_fraction: float
    near_bandwidth: float


def traffic_path_of(levels: tuple[Link, ...], plan: Plan, rates: DeviceRates, profile: TimeProfile) -> TrafficPath:
    """Return the path of a plan. On a CPU nothing overlaps, because Gloo's threads need the cores that compute."""
    mesh, comm, is_sharded = plan.mesh, plan.comm, plan.sharding != "none"
    hides_nothing = rates.generation == "cpu" or not comm.overlap
    if is_sharded:
        shards = max(1, mesh.expert_ranks // mesh.ep)
        dense, spread = (mesh.shards, mesh.dp_replicate), (shards, max(1, mesh.data // (shards * mesh.ep)))
    else:
        dense, spread = (1, mesh.data), (1, max(1, mesh.data // mesh.ep))
    return TrafficPath(
        _rings(levels, mesh.tp, *dense),
        _rings(levels, mesh.tp * mesh.ep, *spread),
        rates.element_bytes,
        profile.parameter_bytes.gradient * _equivalent_fraction(plan) / comm.local_steps,
        0.0 if hides_nothing else profile.dp_overlap[is_sharded],
        RING_EFFICIENCY * levels[0].bandwidth,
    )


def _equivalent_fraction(plan: Plan) -> float:
    """Return the size of an all-reduce that takes as long as the compressed one, as a fraction of the gradient.

    Each rank selects other top-k values, so these are all-gathered: once per rank, where an all-reduce goes around
    twice.
    """
    compression = plan.comm.compression
    return COMPRESSED_FRACTION[compression] * (plan.mesh.data / 2 if compression == "topk" else 1.0)


def exposed_traffic(path: TrafficPath, plan: Plan, stage: StageTime) -> dict[str, float]:
    """Return the exposed communication seconds of a step, by what is sent and on which link.

    Replicas reduce once, in the last backward. Shards gather their weights block by block: for every forward and
    backward if weights are freed in between, else once per step. Sharded gradients are reduced in every backward,
    unsharded ones and those of a pipeline in the last. Nothing hides the first gather and the last reduction.
    """
    if plan.mesh.data == 1:
        return {}
    gathers = reductions = hidden = 0.0
    for unit in stage.units:
        in_forward, in_backward = _transfers(path, plan, unit)
        for times, seconds, window in (in_forward, *in_backward):
            hidden += times * min(seconds, window)
        gathers += in_forward.times * max(0.0, in_forward.seconds - in_forward.window)
        reductions += sum(each.times * max(0.0, each.seconds - each.window) for each in in_backward)
    if path.overlap_fraction:
        first = stage.units[0]
        gather, reduce = _unit_seconds(path, first, first.sharding or plan.sharding)
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


class Transfer(NamedTuple):
    """A transfer that happens `times` per step. At most `window` seconds of compute can hide each one."""

    times: int
    seconds: float
    window: float


def _transfers(path: TrafficPath, plan: Plan, unit: TimeUnit) -> tuple[Transfer, tuple[Transfer, Transfer]]:
    """Return a unit's transfers: weights in forward, then those of the last backward and of the other backwards."""
    sharding, count = unit.sharding or plan.sharding, plan.grad_accum
    gather, reduce = _unit_seconds(path, unit, sharding)
    is_freed = frees_weights(plan, sharding)
    regather = gather if is_freed else 0.0
    not_last = regather + reduce if sharding in ("gradients", "parameters") and plan.mesh.pp == 1 else regather
    forward, backward = path.overlap_fraction * unit.forward, path.overlap_fraction * unit.backward
    in_forward = Transfer((count if is_freed else 1) * unit.count, gather, forward)
    last = Transfer(unit.count, regather + reduce, backward)
    return in_forward, (last, Transfer((count - 1) * unit.count, not_last, backward))


def _unit_seconds(path: TrafficPath, unit: TimeUnit, sharding: str) -> tuple[float, float]:
    """Return the time to gather the weights of one unit, and the time to reduce its gradients."""
    gather = reduce = 0.0
    for num, trained, (shards, replicas) in (
        (unit.dense, unit.trained_dense, path.dense),
        (unit.experts, unit.trained_experts, path.experts),
    ):
        if num and sharding != "none":
            gather += all_gather_seconds(path.weight_bytes * num, shards)
        if trained:
            rounds = 2 if sharding == "none" else 1  # an unsharded tower also gathers its reduced gradients
            reduce += rounds * all_gather_seconds(path.gradient_bytes * trained, shards)
            reduce += all_reduce_seconds(path.gradient_bytes * trained / shards.num_ranks, replicas)
    return gather, reduce


def _rings(levels: tuple[Link, ...], stride: int, shards: int, replicas: int) -> Rings:
    return Rings(ring_of(levels, shards, stride), ring_of(levels, replicas, stride * shards))

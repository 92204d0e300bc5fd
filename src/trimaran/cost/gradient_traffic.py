"""How long weights and gradients travel between data ranks, and how much of it computing does not hide."""

from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost.collective import RING_SHARE, Ring, all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.cost.job import frees_weights
from trimaran.cost.roofline import DeviceRates
from trimaran.cost.stage_time import StageTime, TimeUnit
from trimaran.cost.time_profiles import TimeProfile
from trimaran.hardware import Link

# What a collective on NVLink takes from the products beside it, of its own time: processors, memory, power. Set on
# llm-foundry's A100. A network's moves less at a time, and takes less.
STOLEN_SHARE = 0.43
# What of a gradient's bytes travels: of a square weight of 4096, PowerSGD's two factors of rank 4; of a hundred values
# the largest, with a place of 8 bytes.
COMPRESSED = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 0.002, "topk": 0.03}


class Rings(NamedTuple):
    """The rings that parameters travel on: their shards, and the replicas of those."""

    shards: Ring
    replicas: Ring


class TrafficPath(NamedTuple):
    """How weights and gradients travel: on which rings, in how many bytes each, behind which share of computing."""

    dense: Rings
    experts: Rings
    weight_bytes: float
    gradient_bytes: float
    hidden_share: float
    near_bandwidth: float


def traffic_path_of(levels: tuple[Link, ...], plan: Plan, rates: DeviceRates, profile: TimeProfile) -> TrafficPath:
    """Return how a plan's data ranks meet. Gloo's threads need the cores that compute, so they hide nothing."""
    mesh, comm, is_sharded = plan.mesh, plan.comm, plan.sharding != "none"
    if is_sharded:
        shards = max(1, mesh.expert_ranks // mesh.ep)
        dense, spread = (mesh.shards, mesh.dp_replicate), (shards, max(1, mesh.data // (shards * mesh.ep)))
    else:
        dense, spread = (1, mesh.data), (1, max(1, mesh.data // mesh.ep))
    return TrafficPath(
        _rings(levels, mesh.tp, *dense),
        _rings(levels, mesh.tp * mesh.ep, *spread),
        rates.width,
        profile.passing.gradient * _summed_share(plan) / comm.local_steps,
        0.0 if rates.generation == "cpu" else profile.hides[is_sharded],
        RING_SHARE * levels[0].bandwidth,
    )


def _summed_share(plan: Plan) -> float:
    """Return the bytes of a sum that takes as long, of a whole gradient's.

    Each rank's top-k are others, so they are gathered: as many times as there are ranks, where a sum goes round twice.
    """
    compression = plan.comm.compression
    return COMPRESSED[compression] * (plan.mesh.data / 2 if compression == "topk" else 1.0)


def exposed_traffic(way: TrafficPath, plan: Plan, pace: StageTime) -> dict[str, float]:
    """Return the seconds of a step in which weights and gradients travel and nothing is computed, by what and where.

    Replicas reduce once, with the last backward. Shards gather their weights block by block: for every forward and
    backward where they are freed in between, once a step where they are kept. Sharded gradients travel with every
    backward, whole ones and a pipeline's with the last. The first gather hides behind nothing, nor
    does the last reduction.
    """
    if plan.mesh.data == 1:
        return {}
    gathers = reductions = hidden = 0.0
    for unit in pace.units:
        forth, back = _trips(way, plan, unit)
        for times, seconds, window in (forth, *back):
            hidden += times * min(seconds, window)
        gathers += forth.times * max(0.0, forth.seconds - forth.window)
        reductions += sum(trip.times * max(0.0, trip.seconds - trip.window) for trip in back)
    if way.hidden_share:
        first = pace.units[0]
        gather, reduce = _unit_seconds(way, first, first.sharding or plan.sharding)
        gathers, reductions = gathers + gather, reductions + min(reduce, way.hidden_share * first.backward)
    replicas, shards = way.dense.replicas, way.dense.shards
    where = replicas if replicas.num_ranks > 1 else shards
    pull = min(1.0, where.gather_bandwidth / way.near_bandwidth)
    exposed = {
        f"all-gather of weights on {shards.link}": gathers,
        f"gradients on {where.link}": reductions,
        "computing slowed by collectives": STOLEN_SHARE * pull * hidden,
    }
    return {key: seconds for key, seconds in exposed.items() if seconds}


class Trip(NamedTuple):
    """Something that travels `times` a step while at most `window` seconds of computing run beside it."""

    times: int
    seconds: float
    window: float


def _trips(way: TrafficPath, plan: Plan, unit: TimeUnit) -> tuple[Trip, tuple[Trip, Trip]]:
    """Return how the weights of a unit come for forward, and what travels with the last backward and the others."""
    sharding, count = unit.sharding or plan.sharding, plan.grad_accum
    gather, reduce = _unit_seconds(way, unit, sharding)
    is_freed = frees_weights(plan, sharding)
    again = gather if is_freed else 0.0
    others = again + reduce if sharding in ("gradients", "parameters") and plan.mesh.pp == 1 else again
    forward, backward = way.hidden_share * unit.forward, way.hidden_share * unit.backward
    forth = Trip((count if is_freed else 1) * unit.count, gather, forward)
    return forth, (Trip(unit.count, again + reduce, backward), Trip((count - 1) * unit.count, others, backward))


def _unit_seconds(way: TrafficPath, unit: TimeUnit, sharding: str) -> tuple[float, float]:
    """Return how long it takes to gather the weights of one unit, and to reduce its gradients."""
    gather = reduce = 0.0
    for num, (shards, replicas) in ((unit.dense, way.dense), (unit.experts, way.experts)):
        if not num:
            continue
        if sharding != "none":
            gather += all_gather_seconds(way.weight_bytes * num, shards)
        if unit.is_trained:
            rounds = 2 if sharding == "none" else 1  # whole gradients go back to those that share other towers
            reduce += rounds * all_gather_seconds(way.gradient_bytes * num, shards)
            reduce += all_reduce_seconds(way.gradient_bytes * num / shards.num_ranks, replicas)
    return gather, reduce


def _rings(levels: tuple[Link, ...], stride: int, shards: int, replicas: int) -> Rings:
    return Rings(ring_of(levels, shards, stride), ring_of(levels, replicas, stride * shards))

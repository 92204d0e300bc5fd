"""Time of one optimizer step by phase, and the communication that nothing hides."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trimaran.core import Plan, Seconds, exposed_outer_seconds
from trimaran.cost.collective import all_reduce_seconds, ring_of
from trimaran.cost.gradient_traffic import (
    LATE_MOVED_BYTES,
    copy_seconds,
    exposed_traffic,
    outer_seconds,
    traffic_path_of,
)
from trimaran.cost.job import Job, num_fsdp_units, splits_weights
from trimaran.cost.offload_time import offload_seconds, update_seconds
from trimaran.cost.roofline import FORWARD_HOST_FRACTION, DeviceRates, host_wait, kernel_gaps, rates_for
from trimaran.cost.stack_profiles import TimeProfile
from trimaran.cost.stage_time import (
    StageTime,
    StageTimes,
    levels_of,
    rank_times_of,
    stage_inputs_of,
    stage_inputs_on,
    stage_times_of,
)
from trimaran.cost.states import num_owned_in
from trimaran.machine import Cluster, Link

# How much longer compute takes because all ranks wait for the slowest, for each doubling of the nodes (llm-foundry's
# 13B loses 0.02 from 2 to 16), or of the ranks that share the cores of one machine.
STRAGGLER_FRACTION = {"cuda": 0.005, "cpu": 0.15}
CALIBRATED_STRAGGLER_FRACTION = 0.02  # of a CPU whose rates were measured with all ranks at once
# Time of a step outside forward, backward and update, in the overhead of a block: data, clipping, metrics (two Neoverse
# cores).
CPU_STEP_BLOCKS = 5.0
ACCUMULATE_BYTES = 10  # moved per parameter to add a 16-bit gradient to an fp32 sum: read 2 and 4, write 4
ALWAYS_SHOWN = ("forward", "backward", "comm", "optimizer")
# Fields of a unit that add up if several blocks are one unit.
SUMMED = ("dense", "experts", "trained_dense", "trained_experts", "forward", "backward")
COPIES = "copies of gathered weights"  # among the exposed communication


class StepTime(NamedTuple):
    """Seconds of a step by phase, as the trainer names them. `exposed` splits `comm` by what is sent and where."""

    terms: dict[str, Seconds]
    exposed: dict[str, Seconds]


def step_time_of(job: Job, cluster: Cluster, plan: Plan) -> StepTime:
    """Return the time of a step. `comm` is the communication that compute does not hide.

    With a pipeline, these are the seconds of the slowest rank, for which all others wait. `bubble` is its own wait
    while the pipeline fills and drains. `offload` is the time for copies to and from the host that nothing hides.
    """
    rates, levels = rates_for(job, cluster, plan), levels_of(cluster)
    times = _joined_times(job, plan, stage_times_of(stage_inputs_of(job, rates, levels, plan)))
    return _step_time(job, cluster, plan, times, rates, levels)


def step_times_of(job: Job, cluster: Cluster, plan: Plan, counts: Sequence[int]) -> list[StepTime]:
    """Return the times of a step with so many micro-batches each: a micro-batch takes the same time in all of them."""
    rates, levels = rates_for(job, cluster, plan), levels_of(cluster)
    times = _joined_times(job, plan, stage_times_of(stage_inputs_of(job, rates, levels, plan)))
    plans = (plan.model_copy(update={"grad_accum": count}) for count in counts)
    return [_step_time(job, cluster, each, times, rates, levels) for each in plans]


def step_time_with(job: Job, cluster: Cluster, plan: Plan, times: StageTimes) -> StepTime:
    """Return the time of a step of which the times of the pipeline's ranks are known."""
    joined = _joined_times(job, plan, times)
    return _step_time(job, cluster, plan, joined, rates_for(job, cluster, plan), levels_of(cluster))


def _joined_times(job: Job, plan: Plan, times: StageTimes) -> StageTimes:
    if plan.sharding == "none":
        return times
    slowest = with_joined_units(job, plan, times.slowest)
    heaviest = slowest if times.heaviest is times.slowest else with_joined_units(job, plan, times.heaviest)
    return StageTimes(slowest, heaviest, times.seconds)


def _step_time(
    job: Job, cluster: Cluster, plan: Plan, times: StageTimes, rates: DeviceRates, levels: tuple[Link, ...]
) -> StepTime:
    device, profile, count = cluster.device, job.stack.time, plan.grad_accum
    slowest, heaviest, all_ranks = times
    forward, backward = _pass_seconds(job, plan, slowest, rates)
    exposed = {key: count * seconds for key, seconds in slowest.waits.items()}
    if plan.mesh.data > 1 or any(unit.splits_images for unit in heaviest.units):
        exposed |= exposed_traffic(traffic_path_of(levels, plan, rates, job), plan, heaviest)
    if plan.towers:  # towers that tensor-parallel ranks replicate: each has gradients of its own images, in fp32
        split = [each for each in heaviest.part.holdings if each.is_trained and job.splits_images(each.tower, plan)]
        owned = sum(each.parameters for each in split if job.sharding_of(each.tower, plan) == "none")
        ring = ring_of(levels, plan.mesh.tp, 1)
        if owned:  # FSDP sums those of sharded towers
            exposed[f"gradients of images on {ring.link}"] = all_reduce_seconds(4.0 * owned, ring)
    if job.stack.name == "trimaran" and cluster.num_nodes > 1 and not plan.comm.local.is_on:
        ring = ring_of(levels, cluster.world_size, 1, profile.comm.hops)
        # Gloo sends such a small message around a ring, NCCL up and down a tree.
        is_ring = device.traits.backend == "gloo"
        hops = 2 * (cluster.world_size - 1 if is_ring else math.ceil(math.log2(cluster.num_nodes)))
        exposed[f"sums of the step on {ring.link}"] = hops * ring.reduce_hop * ring.latency
    if copies := copy_seconds(job, plan, heaviest, rates):
        exposed[COPIES] = copies
    if doublings := math.log2(cluster.world_size if device.traits.shares_cores else cluster.num_nodes):
        straggler = CALIBRATED_STRAGGLER_FRACTION if device.cpu_rates else STRAGGLER_FRACTION[device.kind]
        exposed["waiting for the slowest rank"] = straggler * doublings * (forward + backward)
    num_updated = _num_updated(job, plan, heaviest)
    update = _update_seconds(job, cluster, plan, num_updated, rates)
    bubble = 0.0
    if plan.mesh.pp > 1 and plan.pipeline.schedule == "zero-bubble":  # it fills most of it: see `Plan.bubble`
        bubble = count * slowest.seconds * plan.bubble / (1 - plan.bubble)
    elif plan.mesh.pp > 1:
        # All other ranks' time for one micro-batch, while the first arrives and the last leaves; with several stages
        # per rank, a part of it.
        bubble = (all_ranks - slowest.seconds) * plan.mesh.pp / plan.num_stages
    terms = {
        "forward": forward,
        "backward": backward,
        "comm": sum(exposed.values()),
        "bubble": bubble,
        "offload": offload_seconds(job, cluster, plan, slowest, num_owned=num_updated, update=update),
        "optimizer": update,
    }
    if device.traits.runs_async:
        _add_host_waits(terms, _host_seconds(profile, plan, slowest, rates), has_waited=slowest.has_waited)
    if plan.comm.local.is_on:
        path = traffic_path_of(levels, plan, rates, job)
        exchange = exposed_outer_seconds(plan.comm.local, outer_seconds(path, plan, heaviest), sum(terms.values()))
        exposed[f"weights of replicas on {path.dense.replicas.link}"] = exchange
        terms["comm"] += exchange
    return StepTime(
        {term: Seconds(num) for term, num in terms.items() if num or term in ALWAYS_SHOWN},
        {key: Seconds(num) for key, num in exposed.items()},
    )


def pipeline_times_of(job: Job, cluster: Cluster, plan: Plan) -> list[StageTime]:
    """Return the time of a micro-batch on each pipeline rank, if all had this cluster's device."""
    return rank_times_of(stage_inputs_on(job, cluster, plan))


def rank_compute_of(job: Job, cluster: Cluster, plan: Plan, pp_rank: int) -> dict[str, Seconds]:
    """Return what a pipeline rank computes in a step, by phase: without communication, and without the bubble.

    `other` are the copies around FSDP's collectives.
    """
    rates, stage = rates_for(job, cluster, plan), pipeline_times_of(job, cluster, plan)[pp_rank]
    if plan.sharding != "none":
        stage = with_joined_units(job, plan, stage)
    forward, backward = _pass_seconds(job, plan, stage, rates)
    num_updated = _num_updated(job, plan, stage)
    update = _update_seconds(job, cluster, plan, num_updated, rates)
    offload = offload_seconds(job, cluster, plan, stage, num_owned=num_updated, update=update)
    terms = {"forward": forward, "backward": backward, "optimizer": update}
    copies = copy_seconds(job, plan, stage, rates)
    terms |= {name: seconds for name, seconds in (("offload", offload), ("other", copies)) if seconds}
    if cluster.device.traits.runs_async:
        _add_host_waits(terms, _host_seconds(job.stack.time, plan, stage, rates), has_waited=stage.has_waited)
    return {term: Seconds(num) for term, num in terms.items()}


def _pass_seconds(job: Job, plan: Plan, stage: StageTime, rates: DeviceRates) -> tuple[float, float]:
    """Return the seconds of all forwards and of all backwards of a step, with the addition of their gradients."""
    profile, count = job.stack.time, plan.grad_accum
    forward, backward = count * stage.forward, count * stage.backward
    if plan.sharding == "none":  # accumulating shards takes next to no time
        moved = ACCUMULATE_BYTES if splits_weights(job, plan) else profile.parameter_bytes.accumulate
        backward += (count - 1) * moved * stage.part.trained / rates.bandwidth
    if plan.reduces_after_backward:
        backward += LATE_MOVED_BYTES * stage.part.trained / rates.bandwidth
    return forward, backward


def _update_seconds(job: Job, cluster: Cluster, plan: Plan, num_updated: float, rates: DeviceRates) -> float:
    """Return the seconds of the update, and of the host's other work at the end of a step."""
    seconds = update_seconds(job, cluster, plan, num_updated) + kernel_gaps(job.stack.time.host.launches.step, rates)
    if cluster.device.cpu_rates is not None:
        seconds += CPU_STEP_BLOCKS * cluster.device.cpu_rates.layer_us * 1e-6
    return seconds


def with_joined_units(job: Job, plan: Plan, stage: StageTime) -> StageTime:
    """Return the stage with units as FSDP has them: small blocks share one."""
    counts = [num_fsdp_units(job, plan, unit.dense + unit.experts, unit.count) for unit in stage.units]
    if all(count == unit.count for count, unit in zip(counts, stage.units, strict=True)):
        return stage
    joined = []
    for unit, count in zip(stage.units, counts, strict=True):
        size = unit.count / count
        joined.append(unit._replace(count=count, **{name: getattr(unit, name) * size for name in SUMMED}))
    return stage._replace(units=tuple(joined))


def _host_seconds(profile: TimeProfile, plan: Plan, stage: StageTime, rates: DeviceRates) -> dict[str, float]:
    """Return the host time of a step by phase. FSDP's hooks run for every block whose weights are sharded."""
    count, unit = plan.grad_accum, 0.0
    if plan.sharding != "none" and plan.mesh.data > 1:
        unit = rates.host_factor * profile.host.unit * sum(each.count for each in stage.units)
    return {
        "forward": count * (stage.host_forward + FORWARD_HOST_FRACTION * unit),
        "backward": count * (stage.host_backward + (1 - FORWARD_HOST_FRACTION) * unit),
        "optimizer": rates.host_factor * profile.host.step,
    }


def _add_host_waits(terms: dict[str, float], host: dict[str, float], *, has_waited: bool) -> None:
    """Add the time that the device waits for its host to the phases in which the host works.

    `has_waited`: it was already counted for every micro-batch, so only what the host does beside is left.
    """
    busy, total = sum(terms.values()), sum(host.values())
    if total:
        wait = max(0.0, total - busy) if has_waited else host_wait(busy, total)
        for phase, seconds in host.items():
            terms[phase] += wait * seconds / total


def _num_updated(job: Job, plan: Plan, stage: StageTime) -> float:
    """Return how many parameters a rank updates: all trained ones that it holds, or its shard of them."""
    trained = (holding for holding in stage.part.holdings if holding.is_trained)
    return sum(num_owned_in(job, plan, holding) for holding in trained)

"""Time of one optimizer step by phase, and the communication that nothing hides."""

import math
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Plan, Seconds
from trimaran.cost.gradient_traffic import exposed_traffic, traffic_path_of
from trimaran.cost.host_time import FORWARD_HOST_FRACTION, host_wait, kernel_gaps
from trimaran.cost.job import Job, splits_weights
from trimaran.cost.offload_time import offload_seconds, update_seconds
from trimaran.cost.roofline import DeviceRates, rates_of
from trimaran.cost.stage_time import StageTime, stage_inputs_of, stage_times_of
from trimaran.cost.states import num_owned
from trimaran.cost.time_profiles import TimeProfile
from trimaran.hardware import Cluster, Link

# How much longer compute takes because all ranks wait for the slowest, for each doubling of the nodes (llm-foundry's
# 13B loses 0.02 from 2 to 16), or of the ranks that share the cores of one machine.
STRAGGLER_FRACTION = {"cuda": 0.005, "cpu": 0.15}
CALIBRATED_STRAGGLER_FRACTION = 0.02  # of a CPU whose rates were measured with all ranks at once
# Time of a step outside forward, backward and update, in the overhead of a block: data, clipping, metrics (two Neoverse
# cores).
CPU_STEP_BLOCKS = 5.0
ACCUMULATE_BYTES = 10  # moved per parameter to add a 16-bit gradient to an fp32 sum: read 2 and 4, write 4
ALWAYS_SHOWN = ("forward", "backward", "comm", "optimizer")


class StepTime(NamedTuple):
    """Seconds of a step by phase, as the trainer names them. `exposed` splits `comm` by what is sent and where."""

    terms: dict[str, Seconds]
    exposed: dict[str, Seconds]


def step_time_of(job: Job, cluster: Cluster, plan: Plan) -> StepTime:
    """Return the time of a step. `comm` is the communication that compute does not hide.

    With a pipeline, these are the seconds of the slowest rank, for which all others wait. `bubble` is its own wait
    while the pipeline fills and drains. `offload` is the time for copies to and from the host that nothing hides.
    """
    device, levels, profile, count = cluster.device, _levels(cluster), job.stack.time, plan.grad_accum
    rates = rates_of(device, plan.precision)
    slowest, heaviest, all_ranks = stage_times_of(stage_inputs_of(job, rates, levels, plan))
    forward, backward = count * slowest.forward, count * slowest.backward
    if plan.sharding == "none":  # accumulating shards takes next to no time
        moved = ACCUMULATE_BYTES if splits_weights(job, plan) else profile.parameter_bytes.accumulate
        backward += (count - 1) * moved * slowest.part.trained / rates.bandwidth
    exposed = {key: count * seconds for key, seconds in slowest.waits.items()} | exposed_traffic(
        traffic_path_of(levels, plan, rates, profile), plan, heaviest
    )
    if doublings := math.log2(cluster.world_size if device.kind == "cpu" else cluster.num_nodes):
        straggler = CALIBRATED_STRAGGLER_FRACTION if device.cpu_rates else STRAGGLER_FRACTION[device.kind]
        exposed["waiting for the slowest rank"] = straggler * doublings * (forward + backward)
    num_updated = _num_updated(job, plan, heaviest)
    update = update_seconds(job, cluster, plan, num_updated) + kernel_gaps(profile.host.launches.step, rates)
    if device.cpu_rates is not None:
        update += CPU_STEP_BLOCKS * device.cpu_rates.layer_us * 1e-6
    terms = {
        "forward": forward,
        "backward": backward,
        "comm": sum(exposed.values()),
        "bubble": _bubble(plan, slowest.seconds, all_ranks),
        "offload": offload_seconds(job, cluster, plan, slowest, num_owned=num_updated, update=update),
        "optimizer": update,
    }
    if device.kind != "cpu":
        _add_host_waits(terms, _host_seconds(profile, plan, slowest, rates), has_waited=slowest.has_waited)
    return StepTime(
        {term: Seconds(num) for term, num in terms.items() if num or term in ALWAYS_SHOWN},
        {key: Seconds(num) for key, num in exposed.items()},
    )


def _host_seconds(profile: TimeProfile, plan: Plan, stage: StageTime, rates: DeviceRates) -> dict[str, float]:
    """Return the host time of a step by phase. FSDP's hooks run for every block whose weights are sharded."""
    count, unit = plan.grad_accum, 0.0
    if plan.sharding != "none" and plan.mesh.data > 1:
        unit = rates.host_factor * profile.host.unit * sum(each.count for each in stage.units)
    return {
        "forward": count * (stage.host.forward + FORWARD_HOST_FRACTION * unit),
        "backward": count * (stage.host.backward + (1 - FORWARD_HOST_FRACTION) * unit),
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


@lru_cache(maxsize=256)
def _levels(cluster: Cluster) -> tuple[Link, ...]:
    return cluster.levels


def _bubble(plan: Plan, slowest: float, all_ranks: float) -> float:
    """Return how long a pipeline's slowest rank waits while the first micro-batch arrives and the last one leaves.

    That is the time all other ranks need for one micro-batch; with several stages per rank, a part of it. The
    zero-bubble schedule fills most of it: `Plan.bubble` says how much is left.
    """
    if plan.mesh.pp == 1:
        return 0.0
    if plan.pipeline.schedule == "zero-bubble":
        return plan.grad_accum * slowest * plan.bubble / (1 - plan.bubble)
    return (all_ranks - slowest) * plan.mesh.pp / plan.num_stages


def _num_updated(job: Job, plan: Plan, stage: StageTime) -> float:
    """Return how many parameters a rank updates: all trained ones that it holds, or its shard of them."""
    trained = (holding for holding in stage.part.holdings if holding.is_trained)
    return sum(num_owned(plan.mesh, holding, job.sharding_of(holding.tower, plan)) for holding in trained)

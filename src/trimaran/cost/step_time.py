"""How long one optimizer step takes: its phases, and what of the talking nothing hides."""

import math
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Plan, Seconds
from trimaran.cost.gradient_traffic import exposed_traffic, traffic_path_of
from trimaran.cost.job import Job, splits_weights
from trimaran.cost.offload_time import offload_seconds, update_seconds
from trimaran.cost.roofline import rates_of
from trimaran.cost.stage_time import StageTime, ask_of, stage_times_of
from trimaran.cost.states import owned
from trimaran.hardware import Cluster, Link

# What computing gets longer because all wait for the slowest, for each doubling of the nodes (llm-foundry's 13B loses
# 0.02 from 2 to 16), or of the ranks that share one machine's cores with all else that runs there.
SLOWEST_SHARE = {"cuda": 0.005, "cpu": 0.15}
SUMMED_BYTES = 10  # of each parameter whose 16-bit gradient is added to a sum in fp32: read 2 and 4, write 4
ALWAYS = ("forward", "backward", "comm", "optimizer")


class StepTime(NamedTuple):
    """Seconds of a step by phase, as the trainer names them; `exposed` splits `comm` by what travels, and where."""

    terms: dict[str, Seconds]
    exposed: dict[str, Seconds]


def seconds_of(job: Job, cluster: Cluster, plan: Plan) -> StepTime:
    """Return how long a step of the plan takes; `comm` is what computing does not hide.

    Of a pipeline these are the seconds of the busiest rank, for which all others wait. What it waits itself while the
    pipeline fills and drains is `bubble`; what moves to the host and back, and nothing hides, is `offload`.
    """
    device, levels, profile, count = cluster.device, _levels(cluster), job.stack.time, plan.grad_accum
    rates = rates_of(device, plan.precision)
    slowest, heaviest, everyone = stage_times_of(ask_of(job, rates, levels, plan))
    forward, backward = count * slowest.forward, count * slowest.backward
    if plan.sharding == "none":  # sharded sums are small
        added = SUMMED_BYTES if splits_weights(job, plan) else profile.passing.added
        backward += (count - 1) * added * slowest.part.trained / rates.stream
    exposed = {key: count * seconds for key, seconds in slowest.waits.items()} | exposed_traffic(
        traffic_path_of(levels, plan, rates, profile), plan, heaviest
    )
    if jitters := math.log2(cluster.world_size if device.kind == "cpu" else cluster.num_nodes):
        exposed["waiting for the slowest rank"] = SLOWEST_SHARE[device.kind] * jitters * (forward + backward)
    updated = _updated(job, plan, heaviest)
    update = update_seconds(job, cluster, plan, updated)
    terms = {
        "forward": forward,
        "backward": backward,
        "comm": sum(exposed.values()),
        "bubble": _bubble(plan, slowest.seconds, everyone),
        "offload": offload_seconds(job, cluster, plan, slowest, owned=updated, update=update),
        "optimizer": update,
    }
    return StepTime(
        {term: Seconds(num) for term, num in terms.items() if num or term in ALWAYS},
        {key: Seconds(num) for key, num in exposed.items()},
    )


@lru_cache(maxsize=256)
def _levels(cluster: Cluster) -> tuple[Link, ...]:
    return cluster.levels


def _bubble(plan: Plan, slowest: float, everyone: float) -> float:
    """Return how long a pipeline's busiest rank waits while the first micro-batch comes to it and the last leaves.

    That is what all others need for one micro-batch, and with several stages a rank a part of it. The zero-bubble
    schedule fills most of it; `Plan.bubble` says how much is left.
    """
    if plan.mesh.pp == 1:
        return 0.0
    if plan.pipeline.schedule == "zero-bubble":
        return plan.grad_accum * slowest * plan.bubble / (1 - plan.bubble)
    return (everyone - slowest) * plan.mesh.pp / plan.num_stages


def _updated(job: Job, plan: Plan, pace: StageTime) -> float:
    """Return how many parameters a rank updates: of what is trained in its part all, or its slice."""
    trained = (holding for holding in pace.part.holdings if not holding.tower.frozen)
    return sum(owned(plan.mesh, holding, job.sharding_of(holding.tower, plan)) for holding in trained)

"""Chooses the bucket size and the prefetch depth of a plan from the latency and bandwidth of its links.

Both have defaults that are right on fast links. Another value is chosen only if it shortens the predicted step by more
than `MIN_GAIN_FRACTION`. Pinned values stay.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trimaran.core import Plan
from trimaran.cost import predict
from trimaran.cost.collective import GatheredUnit, exposed_gathers, exposed_reduction
from trimaran.cost.gradient_traffic import TrafficPath, traffic_path_of, unit_seconds
from trimaran.cost.job import frees_weights
from trimaran.cost.roofline import rates_of
from trimaran.cost.stage_time import StageTime, stage_inputs_of, stage_times_of
from trimaran.cost.step_time import step_time_of, with_joined_units
from trimaran.planner.question import Question

MEBIBYTE = 1 << 20
BUCKET_SIZES_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400)  # of DDP
UNIT_SIZES_MB = (10, 25, 50, 100)  # of FSDP units, which need memory for their gathered weights
PREFETCHES = (2, 3, 4)
MIN_GAIN_FRACTION = 0.01  # of a step
SURE_FRACTION = 0.75  # of the predicted backward: a size that hides all communication only just is not the best


class CommChoice(NamedTuple):
    """A plan with chosen communication settings, and for each that differs from its default the reason."""

    plan: Plan
    reasons: tuple[str, ...] = ()


def choose_comm(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the bucket size and prefetch depth that expose the least communication."""
    if question.outline is None or not plan.engine_traits.uses_fsdp or plan.mesh.data == 1:
        return CommChoice(plan)
    if not question.for_trainer or question.job.stack.name != "trimaran":
        return CommChoice(plan)
    pinned, reasons = question.pins.comm.model_fields_set, list[str]()
    if "bucket_mb" not in pinned:
        plan, reason = _with_bucket(plan, question)
        reasons += reason
    if "prefetch" not in pinned:
        plan, reason = _with_prefetch(plan, question)
        reasons += reason
    return CommChoice(plan, tuple(reasons))


def _with_bucket(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the best bucket size: of DDP's reductions, or of FSDP units, which small layers share."""
    seconds = dict(_bucket_seconds(plan, question))
    now = plan.comm.bucket_mb
    if now not in seconds:
        return CommChoice(plan)
    best = min(seconds, key=lambda size: (seconds[size], abs(size - now)))
    gain = (seconds[now] - seconds[best]) / _step_seconds(plan, question)
    if gain <= MIN_GAIN_FRACTION:
        return CommChoice(plan)
    chosen = _with_comm(plan, bucket_mb=best)
    if plan.sharding != "none" and not predict(question.job, question.cluster, chosen).fits:
        return CommChoice(plan)
    what = "gradients are reduced" if plan.sharding == "none" else "small layers share units"
    return CommChoice(chosen, (f"comm.bucket_mb {best}: {what} in pieces of {best} MiB instead of {now}, which should "
                               f"shorten steps by {gain:.1%}",))  # fmt: skip


def _bucket_seconds(plan: Plan, question: Question) -> Iterator[tuple[int, float]]:
    """Yield the bucket sizes and what they cost in a step; nothing if the plan has no buckets.

    Data ranks beside tp, pp or ep reduce block by block, and so do units with experts or anything offloaded.
    """
    mesh, comm = plan.mesh, plan.comm
    if mesh.tp * mesh.pp * mesh.ep > 1 or plan.towers or plan.offload != "none":
        return
    if plan.sharding != "none":
        sizes = sorted({*UNIT_SIZES_MB, comm.bucket_mb})
        yield from ((size, _step_seconds(_with_comm(plan, bucket_mb=size), question)) for size in sizes)
        return
    if not comm.overlap or comm.compression != "none" or comm.local.is_on:
        return
    stage, path = _stage(plan, question), _path(plan, question)
    num_bytes = path.replica_bytes * sum(unit.count * unit.trained_dense for unit in stage.units)
    if num_bytes:
        window = SURE_FRACTION * path.overlap_fraction * stage.backward
        for size in sorted({*BUCKET_SIZES_MB, comm.bucket_mb}):
            yield size, exposed_reduction(num_bytes, size * MEBIBYTE, path.dense.replicas, window)


def _with_prefetch(plan: Plan, question: Question) -> CommChoice:
    """Return the plan with the least prefetch depth that hides clearly more gathers, if its memory allows that."""
    if plan.sharding == "none" or plan.mesh.pp > 1 or plan.comm.prefetch != 1:
        return CommChoice(plan)
    path = _path(plan, question)
    if not path.overlap_fraction:
        return CommChoice(plan)
    waits = {depth: _gather_waits(plan, question, path, depth) for depth in (1, *PREFETCHES)}
    step = _step_seconds(plan, question)
    least = min(waits.values())
    if (waits[1] - least) / step <= MIN_GAIN_FRACTION:
        return CommChoice(plan)
    best = next(depth for depth in PREFETCHES if waits[depth] - least <= MIN_GAIN_FRACTION * step)
    chosen = _with_comm(plan, prefetch=best)
    if not predict(question.job, question.cluster, chosen).fits:
        return CommChoice(plan)
    gain = (waits[1] - waits[best]) / step
    return CommChoice(chosen, (f"comm.prefetch {best}: some gathers of weights take longer than the compute of one "
                               f"block before them; this should shorten steps by {gain:.1%}",))  # fmt: skip


def _gather_waits(plan: Plan, question: Question, path: TrafficPath, prefetch: int) -> float:
    """Return how long a step waits for weights of blocks. Embedding and head are gathered before and after them."""
    *blocks, _ = with_joined_units(question.job, plan, _stage(plan, question)).units
    forward, backward = list[GatheredUnit](), list[GatheredUnit]()
    for unit in blocks:
        gather, _ = unit_seconds(path, unit, unit.sharding or plan.sharding)
        forward += [GatheredUnit(gather, path.overlap_fraction * unit.forward)] * unit.count
        backward += [GatheredUnit(gather, path.overlap_fraction * unit.backward)] * unit.count
    if not frees_weights(plan, plan.sharding):
        return exposed_gathers(forward, prefetch)
    return plan.grad_accum * (exposed_gathers(forward, prefetch) + exposed_gathers(backward[::-1], prefetch))


def _stage(plan: Plan, question: Question) -> StageTime:
    cluster, job = question.cluster, question.job
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    return stage_times_of(stage_inputs_of(job, rates, cluster.levels, plan)).heaviest


def _path(plan: Plan, question: Question) -> TrafficPath:
    cluster, job = question.cluster, question.job
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    return traffic_path_of(cluster.levels, plan, rates, job)


def _step_seconds(plan: Plan, question: Question) -> float:
    return sum(step_time_of(question.job, question.cluster, plan).terms.values())


def _with_comm(plan: Plan, **settings: int) -> Plan:
    return plan.model_copy(update={"comm": plan.comm.model_copy(update=settings)})

"""Rules about communication between ranks, and about what is lost by scaling."""

import math
from collections.abc import Iterator
from statistics import median

from trimaran.core import DEVICE_TRAITS, WORLD, Finding, Plan, data_axis, predicted_comm, show_seconds
from trimaran.cost import exposed_reduction, ring_of
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import plural
from trimaran.doctor.predicted_gain import (
    MIN_GAIN_FRACTION,
    Patch,
    best_patch,
    forecast,
    remedy_fields,
    with_measured_links,
)
from trimaran.doctor.rules.balance import imbalance, straggler, uneven_stages
from trimaran.doctor.rules.data import data_bound
from trimaran.doctor.rules.storage import checkpoint_stall
from trimaran.doctor.step_breakdown import (
    StepBreakdown,
    get_number,
    get_numbers,
    phase_seconds,
    steady_steps,
    step_breakdown,
)
from trimaran.planner import BUCKET_SIZES_MB, MEBIBYTE, larger_micro_batch

MIN_COMM_FRACTION = {"cuda": 0.2, "cpu": 0.3}  # of a step; gloo shares the cores that compute
SLOW_NETWORK = "the network is slower than the plan assumed: measure it with `trimaran doctor` on these nodes"
SLOW_NETWORK_FACTOR = 2.0  # times the predicted communication: then the network is slower than it should be


def communication_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield F002 if much communication is exposed, and a patch would reduce it or the network is too slow."""
    measured = step_breakdown(evidence)
    if measured is None or measured.fraction("comm") < min(MIN_COMM_FRACTION.values()):
        return
    question = evidence.planner_inputs()
    kind = question.cluster.device.kind if question else "cuda"
    if measured.fraction("comm") < MIN_COMM_FRACTION[kind]:
        return
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    expected = prediction.time.get("comm", 0.0) if prediction else 0.0
    slow = False
    if prediction is not None:
        # If compute exceeds its prediction as well, cores or clocks are the cause: ranks wait for each other.
        compute_slowdown = max(1.0, measured.compute / (prediction.step_seconds - expected))
        slow = measured.comm > SLOW_NETWORK_FACTOR * compute_slowdown * expected + 0.1 * measured.step
    if DEVICE_TRAITS[kind].shares_cores and not slow:
        return
    best = best_patch(evidence, measured, _candidates(evidence.plan))
    if best is None and not slow:
        return
    collectives = {name: each for name, each in (prediction.exposed if prediction else {}).items() if " on " in name}
    largest = max(collectives, key=lambda each: collectives[each], default="")
    by_axis = predicted_comm(evidence.plan.model_copy(update={"prediction": prediction}))
    most = max(measured.axes, key=measured.axes.__getitem__, default=WORLD)
    where = f", mostly of {most}" if most != WORLD else ""
    excess = f", {measured.comm / expected:.1f} times the prediction" if slow and expected else ""
    yield Finding(
        code="F002",
        severity="warning",
        verdict=f"{measured.fraction('comm'):.0%} of a step is exposed communication: "
        f"{show_seconds(measured.comm)} of {show_seconds(measured.step)}{where}{excess}",
        culprit=largest,
        evidence={
            "comm_share": round(measured.fraction("comm"), 4),
            "comm_seconds": measured.comm,
            "predicted_comm_seconds": expected,
            "step_seconds": measured.step_seconds,
            "exposed": dict(prediction.exposed) if prediction else {},
            "by_axis": dict(measured.axes),
            "predicted_by_axis": by_axis,
        },
        fix=SLOW_NETWORK if slow else "",
        **remedy_fields(best),
        confidence=0.9 if any("waits" in each for each in evidence.steps) else 0.7,
    )


def _candidates(plan: Plan) -> Iterator[Patch]:
    factor = 2
    while plan.grad_accum % factor == 0:
        yield larger_micro_batch(plan, factor)
        factor *= 2
    lower = {"parameters": "gradients", "gradients": "optimizer"}.get(plan.sharding)
    if lower:
        yield {"plan.sharding": lower}
    if plan.sharding == "parameters" and plan.comm.reshard != "never":
        yield {"plan.comm.reshard": "never"}
    if plan.sharding == "none" and plan.comm.compression == "none" and plan.mesh.data > 1:
        overlap = {} if plan.comm.overlap else {"plan.comm.overlap": True}
        yield {"plan.comm.compression": "bf16"} | overlap
        if overlap:
            yield overlap


WIDTHS = {"none": 4, "fp16": 2, "bf16": 2}  # bytes that are sent for each value; other kinds are not plain all-reduces
MAX_BUSY_CORES_FRACTION = 0.8  # of a node's cores: below that some are idle
MIN_EXPOSED_RATIO = 2.0  # of exposed communication now over that with the best size


def bucket(evidence: Evidence) -> Iterator[Finding]:
    """Yield F010 if another bucket size would expose clearly less of the gradient all-reduce."""
    # Each bucket costs the latency of a ring, so many small ones add up. The first bucket is sent when its part of
    # backward is done, and the last one is fully exposed, so large ones overlap little. Gloo overlaps only if cores are
    # idle; then the ring is as slow as it was measured.
    measured, question, plan = step_breakdown(evidence), evidence.planner_inputs(), evidence.plan
    is_ddp = plan.sharding == "none" and plan.mesh.data > 1 and not plan.comm.local.is_on
    is_ddp = is_ddp and plan.comm.overlap and plan.engine_traits.uses_fsdp
    if measured is None or question is None or not is_ddp or plan.comm.compression not in WIDTHS:
        return
    mesh, is_cpu = plan.mesh, question.cluster.device.traits.shares_cores
    busy_cores = get_numbers(evidence.samples, "cpu")
    # Backward of the last micro-batch, which can overlap with the all-reduce.
    if is_cpu and busy_cores and median(busy_cores) < MAX_BUSY_CORES_FRACTION:
        question = with_measured_links(question, plan, measured)
        backward = median(phase_seconds(each, "backward") for each in steady_steps(evidence)) / plan.grad_accum
    else:
        backward = 0.0 if is_cpu else forecast(question, plan).time["backward"] / plan.grad_accum
    ring = ring_of(question.cluster.levels, mesh.data, mesh.tp)
    num_bytes = WIDTHS[str(plan.comm.compression)] * question.job.outline.trained_parameters / (mesh.tp * mesh.pp)
    sizes = {*BUCKET_SIZES_MB, plan.comm.bucket_mb}
    exposed = {size: exposed_reduction(num_bytes, size * MEBIBYTE, ring, backward) for size in sizes}
    best = min(exposed, key=lambda size: (exposed[size], abs(size - 25)))
    now, then = exposed[plan.comm.bucket_mb], exposed[best]
    # No more can be saved than the communication that was measured, of the data ranks alone where it is known.
    waited = min(measured.comm, measured.axes.get(data_axis(plan), measured.comm))
    saved = min(now - then, waited * (1 - then / now)) if now else 0.0
    if saved < MIN_GAIN_FRACTION * measured.step or now < MIN_EXPOSED_RATIO * then:
        return
    small = plan.comm.bucket_mb < best
    count = math.ceil(num_bytes / (plan.comm.bucket_mb * MEBIBYTE))
    yield Finding(
        code="F010",
        severity="note",
        verdict=f"gradients are reduced in {plural(count, 'bucket')} of {plan.comm.bucket_mb} MiB, which is too "
        + ("small: each bucket costs a latency" if small else "large: the last bucket does not overlap with backward"),
        culprit=f"plan.comm.bucket_mb={plan.comm.bucket_mb}",
        evidence={"pieces": count, "gradient_bytes": num_bytes, "comm_seconds": waited, "exposed_now": now,
                  "exposed_then": then},
        patch={"plan.comm.bucket_mb": best},
        expected_effect=f"steps {saved / measured.step:.0%} shorter",
        gain=saved / measured.step,
        confidence=0.6,
    )  # fmt: skip


MIN_LOST_FRACTION = 0.2  # of the ranks' time
MIN_EFFICIENCY_GAP = 0.1  # below the predicted efficiency
PARTS = {"comm": "comm", "imbalance": "straggler", "sync": "checkpoint", "data": "data", "bubble": "bubble"}
RULES_BY_CAUSE = {
    "comm": (communication_bound,),
    "imbalance": (straggler, imbalance),
    "bubble": (uneven_stages,),
    "data": (data_bound,),
    "sync": (checkpoint_stall,),
}


def scaling(evidence: Evidence) -> Iterator[Finding]:
    """Yield F014 if the scaling efficiency is clearly below the prediction, with the loss by cause."""
    # Efficiency is the fraction of a step in which ranks compute. With a reference run it is a rank's throughput
    # relative to a rank there, and waits that the reference has as well are no loss.
    measured, world = step_breakdown(evidence), evidence.plan.mesh.world_size
    lost = _losses(evidence)
    if measured is None or lost is None or world == 1:
        return
    efficiency = 1 - sum(lost.values())
    expected = _expected(evidence, measured)
    if 1 - efficiency < MIN_LOST_FRACTION or expected is None or efficiency > expected - MIN_EFFICIENCY_GAP:
        return
    largest_first = sorted(lost, key=lambda each: -lost[each])
    worst, parts = largest_first[0], [f"{name} {lost[name]:.0%}" for name in largest_first if lost[name] > 0.005]
    causes = (
        (part, each) for part in largest_first for rule in RULES_BY_CAUSE.get(part, ()) for each in rule(evidence)
    )
    part, cause = next(causes, (worst, None))
    if (cause is None or part != worst) and evidence.reference is None:
        question = evidence.planner_inputs()
        if question is not None and question.cluster.device.traits.shares_cores:
            return  # ranks that share cores wait for each other: only the machine is the cause
    yield Finding(
        code="F014",
        severity="warning",
        verdict=f"{world} ranks do the work of {world * efficiency:.1f}, expected {world * expected:.1f}: "
        f"lost to {', '.join(parts)}",
        culprit=f"{worst}: {cause.culprit}" if cause and cause.culprit and part == worst else worst,
        evidence={"speedup": round(world * efficiency, 2), "efficiency": round(efficiency, 4),
                  "expected_efficiency": round(expected, 4), "compared": evidence.reference is not None,
                  "lost": {name: round(each, 4) for name, each in lost.items()}},
        patch=cause.patch if cause else {},
        fix=(cause.fix if cause else "")
        or ("" if cause and cause.patch and part == worst else f"check the largest loss: {worst}"),
        expected_effect=cause.expected_effect if cause else "",
        gain=cause.gain if cause else None,
        confidence=0.8 if evidence.reference is None else 0.95,
    )  # fmt: skip


def efficiency(evidence: Evidence) -> float | None:
    """Return the fraction of a step in which ranks compute, or their throughput relative to the reference run."""
    lost = _losses(evidence)
    return None if lost is None else 1 - sum(lost.values())


def _losses(evidence: Evidence) -> dict[str, float] | None:
    """Return the lost fractions of a rank's time by cause; None with too few steps."""
    measured = step_breakdown(evidence)
    if measured is None:
        return None
    if evidence.reference is None:
        return {name: measured.fraction(part) for name, part in PARTS.items() if name != "bubble" or measured.bubble}
    here, there = _seconds_per_sample(evidence), _seconds_per_sample(evidence.reference)
    if here is None or there is None:
        return None
    total = sum(here.values())
    return {name: (here[name] - there[name]) / total for name in here if here[name] or there[name]}


def _seconds_per_sample(evidence: Evidence) -> dict[str, float] | None:
    measured, samples = step_breakdown(evidence), [each for each in evidence.steps if get_number(each, "samples")]
    if measured is None or not samples:
        return None
    ranks = evidence.plan.mesh.world_size / samples[-1]["samples"]
    return {name: ranks * getattr(measured, part) for name, part in {**PARTS, "compute": "compute"}.items()}


def _expected(evidence: Evidence, measured: StepBreakdown) -> float | None:
    """Return the predicted efficiency with the measured compute: a wrong prediction is another finding (F015)."""
    question = evidence.planner_inputs()
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    if prediction is None:
        return None
    comm, bubble = (prediction.time.get(name, 0.0) for name in ("comm", "bubble"))
    compute = prediction.step_seconds - comm - bubble
    slowdown = max(1.0, measured.compute / compute)
    return slowdown * compute / (slowdown * (compute + bubble) + comm)

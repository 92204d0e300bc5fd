"""F002: exposed communication."""

from collections.abc import Iterator

from trimaran.core import Finding, Plan, Prediction, show_seconds
from trimaran.core.device_traits import DEVICE_TRAITS
from trimaran.core.plan import WORLD, predicted_comm
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_patch, forecast
from trimaran.doctor.step_breakdown import StepBreakdown, step_breakdown
from trimaran.planner.neighbours import larger_micro_batch

MIN_COMM_FRACTION = {"cuda": 0.2, "cpu": 0.3}  # of a step; gloo shares the cores that compute
SLOW_NETWORK = "the network is slower than the plan assumed: measure it with `trimaran doctor` on these nodes"
SLOW_NETWORK_FACTOR = 2.0  # times the predicted communication: then the network is slower than it should be


def communication_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if much communication is exposed, and a patch would reduce it or the network is too slow."""
    measured = step_breakdown(evidence)
    if measured is None or measured.fraction("comm") < min(MIN_COMM_FRACTION.values()):
        return
    question = evidence.planner_inputs()
    kind = question.cluster.device.kind if question else "cuda"
    if measured.fraction("comm") < MIN_COMM_FRACTION[kind]:
        return
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    expected = prediction.time.get("comm", 0.0) if prediction else 0.0
    slow = prediction is not None and _is_slow(measured, prediction)
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
            "step_seconds": measured.step,
            "exposed": dict(prediction.exposed) if prediction else {},
            "by_axis": dict(measured.axes),
            "predicted_by_axis": by_axis,
        },
        patch=best.patch if best else {},
        fix=SLOW_NETWORK if slow else "",
        expected_effect=best.effect if best else "",
        gain=best.gain if best else None,
        confidence=0.9 if any("waits" in each for each in evidence.steps) else 0.7,
    )


def _is_slow(measured: StepBreakdown, prediction: Prediction) -> bool:
    """Whether communication exceeds its prediction by far more than compute does.

    If both do, cores or clocks are the cause: ranks wait for each other.
    """
    expected = prediction.time.get("comm", 0.0)
    compute_slowdown = max(1.0, measured.compute / (prediction.step_seconds - expected))
    return measured.comm > SLOW_NETWORK_FACTOR * compute_slowdown * expected + 0.1 * measured.step


def _candidates(plan: Plan) -> Iterator[Patch]:
    """Yield patches with less communication."""
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

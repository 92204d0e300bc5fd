"""F002: ranks talk while nothing is computed."""

from collections.abc import Iterator

from trimaran.core import Finding, Plan, Prediction, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_of, forecast
from trimaran.doctor.step_breakdown import StepBreakdown, measure

SHARE = {"cuda": 0.2, "cpu": 0.3}  # of the time that must be spent talking; gloo shares the cores that compute
SLOW_NETWORK = "the network is slower than the plan took it to be: `trimaran doctor` on these machines measures it"
WORSE = 2.0  # times the prediction: then the network is slower than it should be


def communication_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when communication that nothing hides is long, and less of it would do or is expected."""
    measured = measure(evidence)
    if measured is None or measured.share("comm") < min(SHARE.values()):
        return
    question = evidence.ask()
    kind = question.cluster.device.kind if question else "cuda"
    if measured.share("comm") < SHARE[kind]:
        return
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    expected = prediction.time.get("comm", 0.0) if prediction else 0.0
    slow = prediction is not None and _is_slow(measured, prediction)
    if kind == "cpu" and not slow:
        return
    remedy = best_of(evidence, measured, _candidates(evidence.plan))
    if remedy is None and not slow:
        return
    travels = {name: each for name, each in (prediction.exposed if prediction else {}).items() if " on " in name}
    largest = max(travels, key=lambda each: travels[each], default="")
    told = f", {measured.comm / expected:.1f} times what was predicted" if slow and expected else ""
    yield Finding(
        code="F002",
        severity="warning",
        verdict=f"{measured.share('comm'):.0%} of a step is communication that nothing hides: "
        f"{show_seconds(measured.comm)} of {show_seconds(measured.step)}{told}",
        culprit=largest,
        evidence={
            "comm_share": round(measured.share("comm"), 4),
            "comm_seconds": measured.comm,
            "predicted_comm_seconds": expected,
            "step_seconds": measured.step,
            "exposed": dict(prediction.exposed) if prediction else {},
        },
        patch=remedy.patch if remedy else {},
        fix=SLOW_NETWORK if slow else "",
        expected_effect=remedy.effect if remedy else "",
        gain=remedy.gain if remedy else None,
        confidence=0.9 if any("waits" in each for each in evidence.steps) else 0.7,
    )


def _is_slow(measured: StepBreakdown, prediction: Prediction) -> bool:
    """Whether the network is to blame: talking is far longer than predicted, and by far more than computing is.

    Where cores or clocks are short both are, and ranks wait for each other.
    """
    expected = prediction.time.get("comm", 0.0)
    starved = max(1.0, measured.compute / (prediction.step_seconds - expected))
    return measured.comm > WORSE * starved * expected + 0.1 * measured.step


def _candidates(plan: Plan) -> Iterator[Patch]:
    """Yield what makes less travel, or less often."""
    times = 2
    while plan.grad_accum % times == 0:
        yield {"plan.micro_batch": plan.micro_batch * times, "plan.grad_accum": plan.grad_accum // times}
        times *= 2
    lower = {"parameters": "gradients", "gradients": "optimizer"}.get(plan.sharding)
    if lower:
        yield {"plan.sharding": lower}
    if plan.sharding == "parameters" and plan.comm.reshard != "never":
        yield {"plan.comm.reshard": "never"}
    if plan.sharding == "none" and plan.comm.compression == "none" and plan.mesh.data > 1:
        yield {"plan.comm.compression": "bf16"}

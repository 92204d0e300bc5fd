"""F014: the run scales worse than predicted."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import forecast
from trimaran.doctor.rules.speed.checkpoint_stall import checkpoint_stall
from trimaran.doctor.rules.speed.communication_bound import communication_bound
from trimaran.doctor.rules.speed.data_bound import data_bound
from trimaran.doctor.rules.speed.imbalance import imbalance
from trimaran.doctor.rules.speed.straggler import straggler
from trimaran.doctor.rules.speed.uneven_stages import uneven_stages
from trimaran.doctor.step_breakdown import StepBreakdown, get_number, step_breakdown

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
    """Yield a finding if the scaling efficiency is clearly below the prediction, with the loss by cause.

    Efficiency is the fraction of a step in which ranks compute. With a reference run it is a rank's throughput
    relative to a rank there, and waits that the reference has as well are no loss.
    """
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
    if (cause is None or part != worst) and evidence.reference is None and _shares_cores(evidence):
        return
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


def _shares_cores(evidence: Evidence) -> bool:
    """Whether ranks share CPU cores: then they wait for each other, and only the machine is the cause."""
    question = evidence.planner_inputs()
    return question is not None and question.cluster.device.traits.shares_cores


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
    """Return the rank-seconds that a sample takes, by cause."""
    measured, samples = step_breakdown(evidence), [each for each in evidence.steps if get_number(each, "samples")]
    if measured is None or not samples:
        return None
    ranks = evidence.plan.mesh.world_size / samples[-1]["samples"]
    return {name: ranks * getattr(measured, part) for name, part in {**PARTS, "compute": "compute"}.items()}


def _expected(evidence: Evidence, measured: StepBreakdown) -> float | None:
    """Return the predicted efficiency of the plan: the fraction of a step that is not waiting.

    Waits are predicted; compute is scaled to the measured one, because a wrong prediction is another finding (F015).
    """
    question = evidence.planner_inputs()
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    if prediction is None:
        return None
    comm, bubble = (prediction.time.get(name, 0.0) for name in ("comm", "bubble"))
    compute = prediction.step_seconds - comm - bubble
    slowdown = max(1.0, measured.compute / compute)
    return slowdown * compute / (slowdown * (compute + bubble) + comm)

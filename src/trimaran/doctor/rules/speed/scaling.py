"""F014: more ranks bring less than they should."""

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
from trimaran.doctor.step_breakdown import StepBreakdown, measure, number

LOST = 0.2  # of the ranks' time
BELOW = 0.1  # under what the prediction has
PARTS = {"comm": "comm", "imbalance": "straggler", "sync": "checkpoint", "data": "data", "bubble": "bubble"}
WHO = {
    "comm": (communication_bound,),
    "imbalance": (straggler, imbalance),
    "bubble": (uneven_stages,),
    "data": (data_bound,),
    "sync": (checkpoint_stall,),
}


def scaling(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the ranks together do clearly less than as many alone would, and what each cause takes.

    A rank alone is taken to compute all the time, so that efficiency is the share of a step in which a rank computes.
    Where there is a run to compare with, it is what a rank does beside a rank there, and what that waits for as well is
    no loss.
    """
    measured, world = measure(evidence), evidence.plan.mesh.world_size
    lost = _losses(evidence)
    if measured is None or lost is None or world == 1:
        return
    efficiency = 1 - sum(lost.values())
    expected = _expected(evidence, measured)
    if 1 - efficiency < LOST or expected is None or efficiency > expected - BELOW:
        return
    largest_first = sorted(lost, key=lambda each: -lost[each])
    worst, parts = largest_first[0], [f"{name} {lost[name]:.0%}" for name in largest_first if lost[name] > 0.005]
    cures = ((part, each) for part in largest_first for rule in WHO.get(part, ()) for each in rule(evidence))
    where, cure = next(cures, (worst, None))
    if (cure is None or where != worst) and evidence.reference is None and _shares_cores(evidence):
        return
    yield Finding(
        code="F014",
        severity="warning",
        verdict=f"{world} ranks do the work of {world * efficiency:.1f}, and {world * expected:.1f} were expected: "
        f"lost to {', '.join(parts)}",
        culprit=f"{worst}: {cure.culprit}" if cure and cure.culprit and where == worst else worst,
        evidence={"speedup": round(world * efficiency, 2), "efficiency": round(efficiency, 4),
                  "expected_efficiency": round(expected, 4), "compared": evidence.reference is not None,
                  "lost": {name: round(each, 4) for name, each in lost.items()}},
        patch=cure.patch if cure else {},
        fix=(cure.fix if cure else "")
        or ("" if cure and cure.patch and where == worst else f"look at what costs most: {worst}"),
        expected_effect=cure.expected_effect if cure else "",
        gain=cure.gain if cure else None,
        confidence=0.8 if evidence.reference is None else 0.95,
    )  # fmt: skip


def _shares_cores(evidence: Evidence) -> bool:
    """Whether ranks compete for cores: then they wait for each other, and nothing but the machine is to blame."""
    question = evidence.ask()
    return question is not None and question.cluster.device.kind == "cpu"


def _losses(evidence: Evidence) -> dict[str, float] | None:
    """Return the shares of a rank's time that are lost, by why; None while there are too few steps to tell."""
    measured = measure(evidence)
    if measured is None:
        return None
    if evidence.reference is None:
        return {name: measured.share(part) for name, part in PARTS.items() if name != "bubble" or measured.bubble}
    here, there = _a_sample(evidence), _a_sample(evidence.reference)
    if here is None or there is None:
        return None
    whole = sum(here.values())
    return {name: (here[name] - there[name]) / whole for name in here if here[name] or there[name]}


def _a_sample(evidence: Evidence) -> dict[str, float] | None:
    """Return what a sample takes, in seconds of a rank, by why."""
    measured, samples = measure(evidence), [each for each in evidence.steps if number(each, "samples")]
    if measured is None or not samples:
        return None
    ranks = evidence.plan.mesh.world_size / samples[-1]["samples"]
    return {name: ranks * getattr(measured, part) for name, part in {**PARTS, "compute": "compute"}.items()}


def _expected(evidence: Evidence, measured: StepBreakdown) -> float | None:
    """Return the efficiency that the model has for the plan: what of a step is not waiting.

    Waiting is the model's word, computing is what was measured: a prediction that is off is another finding.
    """
    question = evidence.ask()
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    if prediction is None:
        return None
    comm, bubble = (prediction.time.get(name, 0.0) for name in ("comm", "bubble"))
    computes = prediction.step_seconds - comm - bubble
    slower = max(1.0, measured.compute / computes)
    return slower * computes / (slower * (computes + bubble) + comm)

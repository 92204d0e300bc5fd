"""F014: more ranks bring less than they should."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.measured import Measured, measure
from trimaran.doctor.remedy import forecast
from trimaran.doctor.rules.speed.checkpoint_stall import checkpoint_stall
from trimaran.doctor.rules.speed.communication_bound import communication_bound
from trimaran.doctor.rules.speed.data_bound import data_bound
from trimaran.doctor.rules.speed.imbalance import imbalance
from trimaran.doctor.rules.speed.straggler import straggler
from trimaran.doctor.rules.speed.uneven_stages import uneven_stages

LOST = 0.2  # of the ranks' time
BELOW = 0.1  # under what the prediction has
WHO = {
    "comm": (communication_bound,),
    "imbalance": (straggler, imbalance),
    "bubble": (uneven_stages,),
    "data": (data_bound,),
    "sync": (checkpoint_stall,),
}


def scaling(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the ranks together do clearly less than as many alone would, and what each cause takes.

    Efficiency is the share of a step in which a rank computes. A rank alone would compute all the time.
    """
    measured, world = measure(evidence), evidence.plan.mesh.world_size
    if measured is None or world == 1:
        return
    lost = losses(measured)
    efficiency = 1 - sum(lost.values())
    expected = _expected(evidence)
    if 1 - efficiency < LOST or expected is None or efficiency > expected - BELOW:
        return
    worst = max(lost, key=lambda each: lost[each])
    cure = next((each for rule in WHO[worst] for each in rule(evidence)), None)
    if cure is None and _shares_cores(evidence):
        return
    parts = ", ".join(
        f"{name} {share:.0%}" for name, share in sorted(lost.items(), key=lambda each: -each[1]) if share > 0.005
    )
    yield Finding(
        code="F014",
        severity="warning",
        verdict=f"{world} ranks do the work of {world * efficiency:.1f}, and {world * expected:.1f} were expected: "
        f"lost to {parts}",
        culprit=worst if cure is None or not cure.culprit else f"{worst}: {cure.culprit}",
        evidence={"speedup": round(world * efficiency, 2), "efficiency": round(efficiency, 4),
                  "expected_efficiency": round(expected, 4),
                  "lost": {name: round(each, 4) for name, each in lost.items()}},
        patch=cure.patch if cure else {},
        fix=(cure.fix if cure else "") or ("" if cure and cure.patch else f"look at what costs most: {worst}"),
        expected_effect=cure.expected_effect if cure else "",
        gain=cure.gain if cure else None,
        confidence=0.8,
    )  # fmt: skip


def _shares_cores(evidence: Evidence) -> bool:
    """Whether ranks compete for cores: then they wait for each other, and nothing but the machine is to blame."""
    question = evidence.ask()
    return question is not None and question.cluster.device.kind == "cpu"


def losses(measured: Measured) -> dict[str, float]:
    """Return the shares of a step in which a rank does not compute, by why."""
    return {
        "comm": measured.share("comm"),
        "imbalance": measured.share("straggler"),
        "sync": measured.share("checkpoint"),
        "data": measured.share("data"),
        **({"bubble": measured.share("bubble")} if measured.bubble else {}),
    }


def _expected(evidence: Evidence) -> float | None:
    """Return the efficiency that the model has for the plan: what of a step is not waiting."""
    question = evidence.ask()
    prediction = forecast(question, evidence.plan) if question else evidence.plan.prediction
    if prediction is None:
        return None
    waits = prediction.time.get("comm", 0.0) + prediction.time.get("bubble", 0.0)
    return 1 - waits / prediction.step_seconds

"""F073: replicas that must be equal are not."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import rank_names, sound, times
from trimaran.doctor.predicted_gain import Patch


def replicas_differ(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the weights of one rank were not those of the others: a device may have lied."""
    events = evidence.of_kind("differ")
    if not events:
        return
    data = events[-1]["data"]
    ranks = data.get("ranks") or ()
    patch: Patch = {}
    if evidence.recipe.faults.not_finite == "stop":
        patch = sound(evidence.recipe, {"faults.not_finite": "rewind"})
    yield Finding(
        code="F073",
        severity="fault",
        verdict=f"replicas differed {times(len(events), 'time')}, the last at step {events[-1].get('step')}: "
        f"{data.get('message')}",
        culprit=rank_names(ranks) or "one of the replicas",
        evidence={"ranks": list(ranks), "keys": list(data.get("keys") or ())[:4], "since": data.get("since")},
        patch=patch,
        fix=f"suspect the device of {rank_names(ranks) or 'each rank'}: leave that machine out and test it",
        expected_effect="the run goes back to where they were equal" if patch else "",
        confidence=0.9,
        step=int(events[-1].get("step") or 0),
    )

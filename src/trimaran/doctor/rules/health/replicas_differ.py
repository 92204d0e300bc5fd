"""F073: replicas of the weights differ, or the memory of a rank changed between two updates."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import plural, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch


def replicas_differ(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a rank's weights differ from its replicas, or changed in memory: its device may be faulty."""
    events = evidence.events_of_kind("differ")
    if not events:
        return
    data = events[-1]["data"]
    ranks = data.get("ranks") or ()
    patch: Patch = {}
    if evidence.recipe.faults.not_finite == "stop":
        patch = valid_patch(evidence.recipe, {"faults.not_finite": "rewind"})
    yield Finding(
        code="F073",
        severity="fault",
        verdict=f"{_what(data)} {plural(len(events), 'time')}, the last time at step {events[-1].get('step')}: "
        f"{data.get('message')}",
        culprit=rank_names(ranks) or "one of the replicas",
        evidence={"ranks": list(ranks), "keys": list(data.get("keys") or ())[:4], "since": data.get("since")},
        patch=patch,
        fix=f"suspect the device of {rank_names(ranks) or 'each rank'}: leave that node out and test it",
        expected_effect="the run rewinds to the last state that is known to be good" if patch else "",
        confidence=0.9,
        step=int(events[-1].get("step") or 0),
    )


def _what(data: Line) -> str:
    return "memory changed between updates" if data.get("type") == "MemoryChanged" else "replicas differed"

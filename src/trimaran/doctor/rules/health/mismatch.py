"""F064: ranks called different collectives."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incident_facts, incident_severity, incidents_of, rank_names


def mismatch(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if ranks called different collectives, with the line of each call."""
    incidents = incidents_of(evidence, "mismatch")
    if not incidents:
        return
    last = incidents[-1]
    sites = (last.get("evidence") or {}).get("sites") or {}
    # Earlier versions wrote "stands at".
    lines = [
        sites[str(rank)].removeprefix("stands at ").removeprefix("is at ")
        for rank in last.get("suspects") or ()
        if str(rank) in sites
    ]
    yield Finding(
        code="F064",
        severity=incident_severity(incidents),
        verdict=f"{last.get('what')}, after step {last.get('step')}",
        culprit=rank_names(last.get("suspects") or ()),
        evidence={
            "incident": last.get("id"),
            "sites": sites,
            "facts": incident_facts(last)[:4],
            "count": len(incidents),
        },
        fix="make every rank call the same collectives in the same order: look for an `if` on the rank or its data "
        + (f"around {lines[0]}" if lines else "around the collective"),
        confidence=0.9,
        step=int(last.get("step") or 0),
    )

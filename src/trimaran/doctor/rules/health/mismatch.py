"""F064: ranks called different collectives."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import facts_of, incidents_of, rank_names, severity_of


def mismatch(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when ranks called collectives that do not belong together, with where each of them did."""
    incidents = incidents_of(evidence, "mismatch")
    if not incidents:
        return
    last = incidents[-1]
    sites = (last.get("evidence") or {}).get("sites") or {}
    theirs = [sites[str(rank)].removeprefix("stands at ") for rank in last.get("suspects") or () if str(rank) in sites]
    yield Finding(
        code="F064",
        severity=severity_of(incidents),
        verdict=f"{last.get('what')}, after step {last.get('step')}",
        culprit=rank_names(last.get("suspects") or ()),
        evidence={"incident": last.get("id"), "sites": sites, "facts": facts_of(last)[:4], "count": len(incidents)},
        fix="let every rank make the same calls in the same order: look for an `if` on the rank or on its data "
        + (f"around {theirs[0]}" if theirs else "around the collective"),
        confidence=0.9,
        step=int(last.get("step") or 0),
    )

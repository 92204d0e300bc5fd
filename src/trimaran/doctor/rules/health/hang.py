"""F063: a rank hung."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import (
    ended_run,
    incident_facts,
    incident_severity,
    incidents_of,
    plural,
    rank_names,
)


def hang(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the run hung: which rank, where in the code, and which ranks only waited for it."""
    incidents = incidents_of(evidence, "hang")
    if not incidents:
        return
    last = incidents[-1]
    files = [str(each) for each in (last.get("evidence") or {}).get("files", ())]
    facts = incident_facts(last)
    yield Finding(
        code="F063",
        severity=incident_severity(incidents),
        verdict=f"the run hung {plural(len(incidents), 'time')}, the last time after step {last.get('step')}: "
        f"{last.get('what')}" + (f"; {facts[0]}" if facts else ""),
        culprit=rank_names(last.get("suspects") or ()),
        evidence={
            "incident": last.get("id"),
            "facts": facts[:4],
            "victims": list(last.get("victims") or ()),
            "cost": last.get("cost") or {},
            "count": len(incidents),
        },
        fix=f"read the stack in incidents/{last.get('id')}/{files[0] if files else ''}: it shows where that rank waits",
        expected_effect=""
        if ended_run(last)
        else "the run recovered by itself, and will hang again until this is fixed",
        confidence=0.9 if last.get("suspects") else 0.5,
        step=int(last.get("step") or 0),
    )

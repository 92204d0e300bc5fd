"""F063: a rank stood still."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import facts_of, incidents_of, is_over, rank_names, severity_of, times


def hang(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the run has hung: who, where that rank stood, who only waited for it."""
    incidents = incidents_of(evidence, "hang")
    if not incidents:
        return
    last = incidents[-1]
    files = [str(each) for each in (last.get("evidence") or {}).get("files", ())]
    facts = facts_of(last)
    yield Finding(
        code="F063",
        severity=severity_of(incidents),
        verdict=f"the run hung {times(len(incidents), 'time')}, the last after step {last.get('step')}: "
        f"{last.get('what')}" + (f"; {facts[0]}" if facts else ""),
        culprit=rank_names(last.get("suspects") or ()),
        evidence={
            "incident": last.get("id"),
            "facts": facts[:4],
            "victims": list(last.get("victims") or ()),
            "cost": last.get("cost") or {},
            "count": len(incidents),
        },
        fix=f"read the stack in incidents/{last.get('id')}/{files[0] if files else ''}: it is where that rank waits",
        expected_effect="" if is_over(last) else "it went on by itself, and will hang again until that is mended",
        confidence=0.9 if last.get("suspects") else 0.5,
        step=int(last.get("step") or 0),
    )

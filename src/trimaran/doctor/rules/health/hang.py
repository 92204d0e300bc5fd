"""F063: a rank hung."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import (
    ended_run,
    incident_facts,
    incident_severity,
    incidents_of,
    plural,
    rank_names,
    was_passed,
)


def hang(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the run hung: which rank, where in the code, and which ranks only waited for it."""
    incidents = incidents_of(evidence, "hang")
    if not incidents:
        return
    last = incidents[-1]
    files = [str(each) for each in (last.get("evidence") or {}).get("files", ())]
    facts = incident_facts(last)
    passed = was_passed(evidence, last)
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
        expected_effect=_outlook(last, len(incidents), passed=passed),
        confidence=_confidence(last, len(incidents), passed=passed),
        step=int(last.get("step") or 0),
    )


def _outlook(last: Line, count: int, *, passed: bool) -> str:
    """Return what to expect of the run. A hang that the run later got past need not come back."""
    if ended_run(last):
        return ""
    if not passed:
        return "the run has not got past this point yet, and may hang there again until this is fixed"
    if count > 1:
        return "the run later got past this point, but it hung more than once"
    return "the run later got past this point: the cause may have been the machine, and need not come back"


def _confidence(last: Line, count: int, *, passed: bool) -> float:
    """Return how sure it is that something must be fixed."""
    if passed and not ended_run(last):
        return 0.5 if count > 1 else 0.3
    return 0.9 if last.get("suspects") else 0.5

"""F067: ranks or machines lost each other."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import facts_of, incidents_of, rank_names, severity_of, times


def network(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a connection or a machine was lost.

    What a run was only told of and went on with (a wire that is slow, a clock that differs) lost nobody.
    """
    incidents = [each for each in incidents_of(evidence, "network", "host") if each.get("action") != "continued"]
    if not incidents:
        return
    last = incidents[-1]
    named = (last.get("evidence") or {}).get("nodes")
    yield Finding(
        code="F067",
        severity=severity_of(incidents),
        verdict=f"ranks lost each other {times(len(incidents), 'time')}, the last after step {last.get('step')}: "
        f"{last.get('what')}",
        culprit=str(named or rank_names(last.get("suspects") or ()) or "what connects the ranks"),
        evidence={
            "incident": last.get("id"),
            "facts": facts_of(last)[:4],
            "count": len(incidents),
            "cost": last.get("cost") or {},
        },
        fix="run `trimaran doctor` on these machines: it measures every pair and names the one that is slow or silent",
        confidence=0.7,
        step=int(last.get("step") or 0),
    )

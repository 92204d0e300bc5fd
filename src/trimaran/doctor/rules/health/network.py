"""F067: ranks or nodes lost their connection."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incident_facts, incident_severity, incidents_of, plural, rank_names


def network(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a connection or a node was lost.

    Incidents that the run only noted, such as a slow link or a clock skew, do not count.
    """
    incidents = [each for each in incidents_of(evidence, "network", "host") if each.get("action") != "continued"]
    if not incidents:
        return
    last = incidents[-1]
    named = (last.get("evidence") or {}).get("nodes")
    yield Finding(
        code="F067",
        severity=incident_severity(incidents),
        verdict=f"ranks lost their connection {plural(len(incidents), 'time')}, the last time after step "
        f"{last.get('step')}: {last.get('what')}",
        culprit=str(named or rank_names(last.get("suspects") or ()) or "the network between the ranks"),
        evidence={
            "incident": last.get("id"),
            "facts": incident_facts(last)[:4],
            "count": len(incidents),
            "cost": last.get("cost") or {},
        },
        fix="run `trimaran doctor` on these nodes: it measures every pair and names the node that is slow or silent",
        confidence=0.7,
        step=int(last.get("step") or 0),
    )

"""F062: memory ran out; who held it, and the cheapest way out."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incidents_of, rank_names, severity_of, sound
from trimaran.doctor.memory_evidence import largest_holder
from trimaran.doctor.memory_fix import FIXED, cheapest_memory_fix
from trimaran.doctor.predicted_gain import Patch


def out_of_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a rank ran out of memory."""
    incidents = incidents_of(evidence, "oom")
    if not incidents:
        return
    last = incidents[-1]
    replanned = last.get("action") == "replanned"
    way = None if replanned else cheapest_memory_fix(evidence, ran_out=True)
    patch = _present(evidence) if replanned else way.patch if way else {}
    holder = _held(evidence, last) or _needed(evidence)
    if replanned:
        effect = "a new start has the plan that fitted, and does not run out first"
    else:
        effect = way.effect if way else ""
    yield Finding(
        code="F062",
        severity=severity_of(incidents),
        verdict=f"{last.get('what')}"
        + (f"; {holder}" if holder else "")
        + (f". The run went on with another plan: {last.get('evidence', {}).get('why', '')}" if replanned else ""),
        culprit=rank_names(last.get("suspects") or ()),
        evidence={"incident": last.get("id"), "step": last.get("step"), "count": len(incidents), "holder": holder},
        patch=patch,
        fix="" if patch else "use more or larger devices, shorter sequences or a smaller model",
        expected_effect=effect,
        gain=way.gain if way else None,
        confidence=0.9,
        step=int(last.get("step") or 0),
    )


def _present(evidence: Evidence) -> Patch:
    """Return the fields that the run changed to get on, as a patch."""
    plan = evidence.plan
    fields: Patch = {"plan.micro_batch": plan.micro_batch, "plan.grad_accum": plan.grad_accum}
    return sound(evidence.recipe, fields | ({"plan.recompute": plan.recompute} if plan.recompute != "none" else {}))


def _held(evidence: Evidence, incident: Line) -> str:
    """Return who held most of the memory when it ran out, where a snapshot was taken then."""
    suspects = incident.get("suspects") or ()
    taken = [each for each in evidence.snapshots if "oom" in each and each["rank"] in suspects]
    most = largest_holder(taken[-1]) if taken else None
    return f"{most[0]} held most, {show_bytes(most[1])}, see profiles/{taken[-1]['file']}" if most else ""


def _needed(evidence: Evidence) -> str:
    """Return what needs most of the memory that a plan decides over, by the prediction."""
    told = evidence.plan.prediction.memory if evidence.plan.prediction else {}
    terms = {name: size for name, size in told.items() if name not in FIXED}
    if not terms:
        return ""
    most = max(terms, key=lambda name: terms[name])
    size = f"{show_bytes(terms[most])} of {show_bytes(sum(terms.values()))}"
    return f"most of what the plan needs is {most.replace('_', ' ')}, {size}"

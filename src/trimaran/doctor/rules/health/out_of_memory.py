"""F062: memory ran out; what held it, and the cheapest fix."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incident_severity, incidents_of, rank_names, valid_patch
from trimaran.doctor.memory_evidence import largest_holder
from trimaran.doctor.memory_fix import adapter_fix, cheapest_memory_fix
from trimaran.planner.memory_ladder import FIXED_TERMS, Patch

OTHER_FIX = "use more or larger devices, shorter sequences or a smaller model"


def out_of_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a rank ran out of memory."""
    incidents = incidents_of(evidence, "oom")
    if not incidents:
        return
    last = incidents[-1]
    replanned = last.get("action") == "replanned"
    memory_fix = None if replanned else cheapest_memory_fix(evidence, ran_out=True) or adapter_fix(evidence)
    patch = _present_plan(evidence) if replanned else memory_fix.patch if memory_fix else {}
    holder = _largest_in_snapshot(evidence, last) or _largest_predicted(evidence)
    if replanned:
        effect = "a new run starts with the plan that fits, and does not run out of memory first"
    else:
        effect = memory_fix.effect if memory_fix else ""
    yield Finding(
        code="F062",
        severity=incident_severity(incidents),
        verdict=f"{last.get('what')}"
        + (f"; {holder}" if holder else "")
        + (f". The run continued with another plan: {last.get('evidence', {}).get('why', '')}" if replanned else ""),
        culprit=rank_names(last.get("suspects") or ()),
        evidence={"incident": last.get("id"), "step": last.get("step"), "count": len(incidents), "holder": holder},
        patch=patch,
        fix="" if patch and not (memory_fix and memory_fix.caution) else OTHER_FIX,
        expected_effect=effect,
        gain=memory_fix.gain if memory_fix and not memory_fix.caution else None,
        confidence=0.9,
        step=int(last.get("step") or 0),
    )


def _present_plan(evidence: Evidence) -> Patch:
    """Return the fields that the memory ladder may have changed in the run's new plan, as a patch."""
    plan = evidence.plan
    rows: Patch = {"plan.micro_batches": [*plan.rows_by_rank]} if plan.rows_by_rank else {}
    fields: Patch = (rows or {"plan.micro_batch": plan.micro_batch}) | {"plan.grad_accum": plan.grad_accum}
    changed = {"recompute": "none", "sharding": "none", "offload": "none", "loss": "logits"}
    fields |= {f"plan.{name}": getattr(plan, name) for name, usual in changed.items() if getattr(plan, name) != usual}
    if plan.sharding != "none" or plan.mesh.cp > 1:
        axes = ("dp_replicate", "dp_shard", "cp")
        fields |= {f"plan.mesh.{axis}": getattr(plan.mesh, axis) for axis in axes}
    return valid_patch(evidence.recipe, fields)


def _largest_in_snapshot(evidence: Evidence, incident: Line) -> str:
    """Return the largest holder when memory ran out; '' without a snapshot."""
    suspects = incident.get("suspects") or ()
    taken = [each for each in evidence.snapshots if "oom" in each and each["rank"] in suspects]
    most = largest_holder(taken[-1]) if taken else None
    return f"{most[0]} held most, {show_bytes(most[1])}, see profiles/{taken[-1]['file']}" if most else ""


def _largest_predicted(evidence: Evidence) -> str:
    """Return the largest term of the predicted memory that a plan can change; '' without a prediction."""
    memory = evidence.plan.prediction.memory if evidence.plan.prediction else {}
    terms = {name: size for name, size in memory.items() if name not in FIXED_TERMS}
    if not terms:
        return ""
    most = max(terms, key=lambda name: terms[name])
    size = f"{show_bytes(terms[most])} of {show_bytes(sum(terms.values()))}"
    return f"most of the plan's memory is {most.replace('_', ' ')}, {size}"

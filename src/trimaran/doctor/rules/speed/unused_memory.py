"""F006: unused device memory could make steps shorter."""

from collections.abc import Iterator

from trimaran.core import Finding, Plan, show_bytes
from trimaran.doctor.device_memory import usable_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_patch
from trimaran.doctor.step_breakdown import get_number, step_breakdown
from trimaran.planner.neighbours import larger_micro_batches

MAX_USED_FRACTION = 0.7  # of a device's memory


def unused_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a larger micro-batch, less recompute or less offload fits and shortens the step."""
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None:
        return
    peak = max((get_number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    total = usable_bytes(evidence) or float(question.cluster.device.memory_bytes)
    if not peak or peak > MAX_USED_FRACTION * total:
        return
    best = best_patch(evidence, measured, _candidates(evidence.plan))
    if best is None:
        return
    yield Finding(
        code="F006",
        severity="warning" if best.gain > 0.15 else "note",
        verdict=f"only {peak / total:.0%} of the memory is in use ({show_bytes(peak)} of {show_bytes(total)}), and "
        "using more would shorten steps",
        culprit=f"micro-batch {evidence.plan.micro_batch} x accumulation {evidence.plan.grad_accum}",
        evidence={
            "peak_bytes": peak,
            "total_bytes": total,
            "micro_batch": evidence.plan.micro_batch,
            "recompute": evidence.plan.recompute,
            "sharding": evidence.plan.sharding,
        },
        patch=best.patch,
        expected_effect=best.effect,
        gain=best.gain,
        confidence=0.8,
    )


def _candidates(plan: Plan) -> Iterator[Patch]:
    """Yield patches that use more memory to save time."""
    yield from larger_micro_batches(plan)
    if plan.recompute != "none":
        yield {"plan.recompute": "none"}
        yield from ({"plan.recompute": "none", **each} for each in larger_micro_batches(plan))
    if plan.offload != "none":
        yield {"plan.offload": "none"}

"""F006: memory lies idle that would make steps shorter."""

from collections.abc import Iterator

from trimaran.core import Finding, Plan, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_of, larger_micro_batches
from trimaran.doctor.step_breakdown import measure, number

MOST = 0.7  # of a device's memory that an under-used one has in use


def unused_memory(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a larger micro-batch, or less saving of memory, fits and pays."""
    measured, question = measure(evidence), evidence.ask()
    if measured is None or question is None:
        return
    peak = max((number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    totals = [total for each in evidence.steps if (total := number(each, "memory", "total"))]
    total = totals[-1] if totals else float(question.cluster.device.memory_bytes)
    if not peak or peak > MOST * total:
        return
    remedy = best_of(evidence, measured, _candidates(evidence.plan))
    if remedy is None:
        return
    yield Finding(
        code="F006",
        severity="warning" if remedy.gain > 0.15 else "note",
        verdict=f"{peak / total:.0%} of the memory is in use ({show_bytes(peak)} of {show_bytes(total)}), and with "
        "more of it steps would be shorter",
        culprit=f"micro-batch {evidence.plan.micro_batch} x accumulation {evidence.plan.grad_accum}",
        evidence={
            "peak_bytes": peak,
            "total_bytes": total,
            "micro_batch": evidence.plan.micro_batch,
            "recompute": evidence.plan.recompute,
            "sharding": evidence.plan.sharding,
        },
        patch=remedy.patch,
        expected_effect=remedy.effect,
        gain=remedy.gain,
        confidence=0.8,
    )


def _candidates(plan: Plan) -> Iterator[Patch]:
    """Yield what takes more memory for less time."""
    yield from larger_micro_batches(plan)
    if plan.recompute != "none":
        yield {"plan.recompute": "none"}
        yield from ({"plan.recompute": "none", **each} for each in larger_micro_batches(plan))
    if plan.offload != "none":
        yield {"plan.offload": "none"}

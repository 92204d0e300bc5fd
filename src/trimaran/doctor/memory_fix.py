"""Finds how much memory a device has for a run, and the plan change that saves enough of it at the least cost."""

from trimaran.core import Prediction, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.predicted_gain import Remedy, forecast
from trimaran.doctor.step_breakdown import get_number, get_numbers
from trimaran.planner import MAX_MEMORY_FRACTION, Patch, Question, adapter_changes, cheapest_first, plan_bytes

CONTEXT_BYTES = 4 << 30  # of a rank outside its allocator: CUDA context, libraries, NCCL buffers
OTHERS_SAMPLES = 3  # the lowest of these counts, so that memory freed meanwhile does not


def _memory_remedy(patch: Patch, now: Prediction, then: Prediction, caution: str = "") -> Remedy:
    """Return the patch as a remedy, from the predictions of the present plan and of the patched one."""
    gain = 1 - then.step_seconds / now.step_seconds
    change = f"{abs(gain):.0%} {'shorter' if gain > 0 else 'longer'}"
    size = f"{show_bytes(plan_bytes(then))} instead of {show_bytes(plan_bytes(now))}"
    effect = f"{caution}{size} on each device, and steps {change} by the cost model"
    return Remedy(patch, gain, effect, caution, then.peak_bytes / now.peak_bytes if now.peak_bytes else 1.0)


def cheapest_memory_fix(evidence: Evidence, *, ran_out: bool) -> Remedy | None:
    """Return the fitting patch with the shortest step; None if none fits or nothing can be predicted.

    Predictions of other plans are scaled by the error of the present plan's prediction. If memory `ran_out`, the
    present plan needs more than the device has, whatever was predicted.
    """
    question = evidence.planner_inputs()
    if question is None:
        return None
    now, total = forecast(question, evidence.plan), capacity(evidence, question)
    needed = _needed_bytes(evidence, question, now, total if ran_out else 0.0)
    for rung in cheapest_first(evidence.plan, question, needed_bytes=needed, device_bytes=total):
        if valid_patch(evidence.recipe, rung.patch):
            return _memory_remedy(rung.patch, now, rung.prediction)
    return None


def adapter_fix(evidence: Evidence) -> Remedy | None:
    """Return the first adapter with which a run that ran out of memory fits, where no change of its plan is enough."""
    # It is not the same training: an adapter is trained, and the whole model is not. Where it takes more, the patch
    # also changes the plan.
    question = evidence.planner_inputs()
    if question is None:
        return None
    now, total = forecast(question, evidence.plan), capacity(evidence, question)
    excess = _needed_bytes(evidence, question, now, total) / plan_bytes(now)
    for change in adapter_changes(question):
        section = change.question.recipe.model.adapter
        assert section is not None
        if evidence.recipe.model.adapter is not None:
            patch: Patch = {"model.adapter.base": section.base}
            caution = "the frozen weights are rounded to 4 bits; "
        else:
            base = {} if section.base == "auto" else {"base": section.base}
            patch = {"model.adapter": {"kind": section.kind, "rank": section.rank} | base}
            caution = f"this trains an adapter of rank {section.rank}, not the whole model; "
        then = forecast(change.question, evidence.plan)
        needed = excess * plan_bytes(then)
        if needed <= MAX_MEMORY_FRACTION * total and valid_patch(evidence.recipe, patch):
            return _memory_remedy(patch, now, then, caution)
        for rung in cheapest_first(evidence.plan, change.question, needed_bytes=needed, device_bytes=total):
            if valid_patch(evidence.recipe, patch | rung.patch):
                return _memory_remedy(patch | rung.patch, now, rung.prediction, caution)
    return None


def _needed_bytes(evidence: Evidence, question: Question, now: Prediction, least: float) -> float:
    """Return what the present plan really needs: as predicted, as measured, or at least as many bytes as these."""
    peak = max(get_numbers(evidence.steps, "peak_bytes"), default=0.0)
    measured = peak if question.cluster.device.traits.has_own_memory else 0.0
    return max(plan_bytes(now), measured, least)


def capacity(evidence: Evidence, question: Question) -> float:
    """Return the memory of one device that the run can use, from its metrics or else from the cluster."""
    usable = usable_bytes(evidence) if question.cluster.device.traits.has_own_memory else None
    return usable or float(question.cluster.device.memory_bytes)


def usable_bytes(evidence: Evidence) -> float | None:
    """Return the memory of rank 0's device without what other processes hold; None if the metrics do not say."""
    totals = [total for total in get_numbers(evidence.steps, "memory", "total") if total]
    return totals[-1] - held_by_others(evidence) if totals else None


def held_by_others(evidence: Evidence) -> float:
    """Return the bytes that other processes hold on rank 0's device, from samples taken while it trained."""
    begin, last = get_number(evidence.steps[0], "time") or 0.0, evidence.steps[-1]
    end = get_number(last, "time") or 0.0
    during = [
        each for each in evidence.samples if each.get("node") == 0 and begin <= (get_number(each, "time") or 0) <= end
    ]
    first = [gpu for each in during for gpu in each.get("gpus") or () if gpu.get("index") == 0]
    held = [used for used in get_numbers(first[-OTHERS_SAMPLES:], "memory_used") if used]
    return max(0.0, min(held, default=0.0) - (get_number(last, "memory", "reserved") or 0.0) - CONTEXT_BYTES)

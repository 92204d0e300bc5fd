"""Finds the plan change that saves enough memory at the least cost in step time, by the cost model."""

from dataclasses import dataclass

from trimaran.core import Prediction, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.predicted_gain import forecast
from trimaran.doctor.step_breakdown import get_number
from trimaran.planner import Question
from trimaran.planner.memory_ladder import Patch, cheapest_first, plan_bytes


@dataclass(frozen=True, slots=True)
class MemoryFix:
    """A patch, with the predictions of the present plan and of the patched one."""

    patch: Patch
    now: Prediction
    then: Prediction

    @property
    def gain(self) -> float:
        """The fraction of a step that the patch saves; negative if steps get longer."""
        return 1 - self.then.step_seconds / self.now.step_seconds

    @property
    def effect(self) -> str:
        change = f"{abs(self.gain):.0%} {'shorter' if self.gain > 0 else 'longer'}"
        size = f"{show_bytes(plan_bytes(self.then))} instead of {show_bytes(plan_bytes(self.now))}"
        return f"{size} on each device, and steps {change} by the cost model"


def cheapest_memory_fix(evidence: Evidence, *, ran_out: bool) -> MemoryFix | None:
    """Return the fitting patch with the shortest step; None if none fits or nothing can be predicted.

    Predictions of other plans are scaled by the error of the present plan's prediction. If memory `ran_out`, the
    present plan needs more than the device has, whatever was predicted.
    """
    question = evidence.planner_inputs()
    if question is None:
        return None
    now, total = forecast(question, evidence.plan), capacity(evidence, question)
    peak = max((get_number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    measured = peak if question.cluster.device.kind != "cpu" else 0.0
    needed = max(plan_bytes(now), measured, total if ran_out else 0.0)
    for rung in cheapest_first(evidence.plan, question, needed_bytes=needed, device_bytes=total):
        if valid_patch(evidence.recipe, rung.patch):
            return MemoryFix(rung.patch, now, rung.prediction)
    return None


def capacity(evidence: Evidence, question: Question) -> float:
    """Return the memory of one device, from the run's metrics or else from the cluster."""
    if question.cluster.device.kind == "cpu":
        return float(question.cluster.device.memory_bytes)
    totals = [total for each in evidence.steps[-1:] if (total := get_number(each, "memory", "total"))]
    return totals[-1] if totals else float(question.cluster.device.memory_bytes)

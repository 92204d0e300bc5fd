"""Reads the per-module-group metrics, which a run writes every few steps."""

from statistics import median

from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.step_breakdown import get_number


def steps_with_groups(evidence: Evidence) -> list[Line]:
    """Return the steps with group metrics whose update was applied."""
    return [each for each in evidence.steps if isinstance(each.get("groups"), dict) and not each.get("skipped")]


def group_medians(evidence: Evidence, field: str, *, last: int = 0, near_peak: bool = False) -> dict[str, float]:
    """Return the median of a field by group, over the `last` steps with group metrics, or all of them.

    With `near_peak` only steps at half of the peak learning rate or more count, because updates are small elsewhere.
    """
    steps = steps_with_groups(evidence)
    if near_peak:
        steps = [each for each in steps if (get_number(each, "lr") or 0.0) >= 0.5 * evidence.recipe.train.lr]
    found: dict[str, list[float]] = {}
    for step in steps[-last:]:
        for name in step["groups"]:
            if (value := get_number(step, "groups", name, field)) is not None:
                found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}

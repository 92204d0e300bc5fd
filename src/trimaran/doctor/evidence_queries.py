"""Queries that several rules share: incidents, samples by node, metrics by module group, names, valid patches."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from trimaran.core import Finding, Recipe, UserError
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.predicted_gain import Patch, apply_patch
from trimaran.doctor.step_breakdown import get_number

RUN_ENDING_ACTIONS = ("stopped", None)  # of an incident that ended the run


def incidents_of(evidence: Evidence, *causes: str) -> list[Line]:
    """Return the incidents with these causes, each in its latest version, in order."""
    latest = {each.get("id", index): each for index, each in enumerate(evidence.incidents)}
    return [each for each in latest.values() if each.get("cause") in causes]


def ended_run(incident: Line) -> bool:
    """Whether the run ended, or still hangs, because of the incident."""
    return incident.get("action") in RUN_ENDING_ACTIONS


def incident_finding(code: str, incidents: Sequence[Line], verdict: str, *, evidence: Line, **fields: Any) -> Finding:
    """Return a finding about the last of these incidents."""
    last = incidents[-1]
    return Finding(
        code=code,
        severity="fault" if ended_run(last) else "warning",
        verdict=verdict,
        culprit=fields.pop("culprit", "") or rank_names(last.get("suspects") or ()),
        evidence={"incident": last.get("id")} | evidence | {"count": len(incidents)},
        step=int(last.get("step") or 0),
        **fields,
    )


def rank_names(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`; '' without ranks."""
    if len(ranks) < 2:
        return "".join(f"rank {each}" for each in ranks)
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def plural(count: int, what: str) -> str:
    """Return `1 step`, `3 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def valid_patch(recipe: Recipe, patch: Patch) -> Patch:
    """Return the patch, or an empty one if the recipe does not accept it."""
    try:
        apply_patch(recipe, patch)
    except UserError:
        return {}
    return patch


def samples_by_node(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    """Yield (name, samples) of each node, oldest sample first."""
    samples: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        samples.setdefault(node_name(sample), []).append(sample)
    yield from samples.items()


def node_name(sample: Line) -> str:
    return str(sample.get("host") or f"node {sample.get('node')}")


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

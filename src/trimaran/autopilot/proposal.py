"""A change that could be made to a running run, what it should gain, and what trying it costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import Plan, Recipe
from trimaran.core.autopilot_section import OTHER_CHANGEABLE_FIELDS
from trimaran.planner.change_plan import RESULT_FIELDS
from trimaran.runs.node_records import LEFT_OUT_FIELD

Patch = dict[str, Any]  # recipe fields by dotted name, such as `plan.micro_batch`
CHECKPOINT_FIELDS = tuple(field for field in OTHER_CHANGEABLE_FIELDS if field.startswith("checkpoint."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One change: `patch`, and `undo`, the patch that takes it back.

    `gain` is the fraction of a step that it should save, `uncertainty` the standard deviation of that. `reason` is one
    sentence, `finding` the code of the finding that it is from. `peak_ratio` is the predicted peak memory with it over
    that without it. `saves_memory`: it is made to need less memory, whatever it costs in time. `is_in_place`: ranks
    make it without building networks again. `first_step_seconds` is what the first step takes longer: compilation.
    `facts` are further numbers to write down with the decision. `is_measured`: its gain follows from steps that were
    measured, so it may take back a change that was kept.
    """

    patch: Patch
    undo: Patch
    gain: float
    uncertainty: float
    reason: str
    finding: str = ""
    peak_ratio: float = 1.0
    saves_memory: bool = False
    is_in_place: bool = False
    first_step_seconds: float = 0.0
    is_measured: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)


def is_changeable(field: str) -> bool:
    """Return whether a running run can change the field at all."""
    return field.startswith("plan.") or field in OTHER_CHANGEABLE_FIELDS or field == LEFT_OUT_FIELD


def changes_course(patch: Iterable[str]) -> bool:
    """Return whether a patch changes the results of training, not only how they are computed."""
    names = [f"plan.{name}" for name in RESULT_FIELDS]
    return any(field == each or field.startswith(f"{each}.") for field in patch for each in names)


def is_pinned(field: str, pins: Iterable[str]) -> bool:
    """Return whether a pin such as `mesh`, `plan.mesh` or `plan.mesh.tp` covers the field.

    Micro-batch and accumulation change together, so a pin of one covers both.
    """
    names = {field, field.replace("grad_accum", "micro_batch"), field.replace("micro_batch", "grad_accum")}
    full = [pin for each in pins for pin in (each, f"plan.{each}")]
    return any(
        name == pin or name.startswith(f"{pin}.") or pin.startswith(f"{name}.") for name in names for pin in full
    )


def settings_of(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Return the present values of the fields that can change, by dotted name."""
    tree = recipe.model_dump(mode="json", include={"data", "checkpoint", "faults"})
    others = {field: _value(tree, field) for field in OTHER_CHANGEABLE_FIELDS}
    return dict(_leaves(plan.model_dump(mode="json"), "plan.")) | others


def undo_of(patch: Mapping[str, Any], settings: Mapping[str, Any]) -> Patch | None:
    """Return the patch that restores the present values; None if a field has none."""
    if any(field not in settings for field in patch):
        return None
    return {field: settings[field] for field in patch}


def describe(patch: Mapping[str, Any], undo: Mapping[str, Any]) -> str:
    """Return a patch as text, such as `micro_batch 1 -> 4, grad_accum 8 -> 2`."""
    return ", ".join(
        f"{name.removeprefix('plan.')} {undo.get(name)} -> {value}"
        for name, value in patch.items()
        if undo.get(name) != value
    )


def _value(tree: Mapping[str, Any], field: str) -> Any:
    here: Any = tree
    for key in field.split("."):
        here = here[key]
    return here


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")

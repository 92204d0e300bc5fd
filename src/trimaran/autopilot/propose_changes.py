"""The changes that could help a run: the patches of findings, and the neighbours of its plan by the cost model.

Everything is priced against the measured step. What the model knows little about gets a wide uncertainty, so that the
policy may try it where that is cheap.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from trimaran.autopilot.proposal import (
    Patch,
    Proposal,
    changes_course,
    describe,
    is_changeable,
    settings_of,
    undo_of,
)
from trimaran.core import Finding, Plan, UserError
from trimaran.core.autopilot_section import OTHER_CHANGEABLE_FIELDS
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.predicted_gain import forecast, predicted_gain
from trimaran.doctor.step_breakdown import StepBreakdown, get_number, step_breakdown
from trimaran.planner.change_plan import RESULT_FIELDS, is_in_place
from trimaran.planner.memory_ladder import plan_with
from trimaran.planner.search.goals import search
from trimaran.planner.search.neighbours import neighbour_patches

MAX_HOST_MEMORY_FRACTION = 0.9  # in use, above which no loader processes are added
MAX_HOST_SAMPLES = 64  # of the nodes, the most recent ones
COMPILE_SECONDS, WARM_COMPILE_SECONDS = 30.0, 10.0  # assumed; 37 s on the 2 busy cores of the test machine
MIN_UNCERTAINTY = 0.05  # of a step: how far the cost model is off even where it predicts no change
RELATIVE_UNCERTAINTY = 0.5  # of a predicted gain
# Findings about memory, not about speed: their patch is taken if memory runs out, whatever it costs in time.
MEMORY_CODES = ("F061", "F062", "F060")
# Kinds of changes that need less memory and more time, or the other way round: more of them is the memory ladder's.
MEMORY_FOR_TIME = ("recompute", "offload")


def proposals_of(
    evidence: Evidence, findings: Sequence[Finding], *, peak_is_near: bool = False, layout: Patch | None = None
) -> list[Proposal]:
    """Return the changes that could help, each once: those of findings first.

    `peak_is_near`: memory may run out, so changes that save memory are wanted, too. `layout` is the patch to the best
    layout, see `best_layout`.
    """
    measured = step_breakdown(evidence)
    if measured is None:
        return []
    settings = settings_of(evidence.plan, evidence.recipe)
    by_patch: dict[str, Proposal] = {}
    for each in _of_findings(evidence, findings, settings):
        by_patch.setdefault(_key(each.patch), each)  # the most important finding comes first
    found, known = list(by_patch.values()), {*by_patch}
    question = evidence.planner_inputs()
    for kind, patch in neighbour_patches(evidence.plan, question, far=True) if question else ():
        if _key(patch) not in known:
            known.add(_key(patch))
            priced = _priced(evidence, measured, patch, settings)
            found += [each for each in priced if kind not in MEMORY_FOR_TIME or each.peak_ratio >= 1]
    for patch in _course_changes(evidence) if question else ():
        if _key(patch) not in known:
            found += _priced(evidence, measured, patch, settings)
    if layout and _key(layout) not in known:
        found += _priced(evidence, measured, layout, settings)
    if peak_is_near:
        found += _saving_memory(evidence, settings)
    return found


def _of_findings(evidence: Evidence, findings: Sequence[Finding], settings: Mapping[str, Any]) -> Iterator[Proposal]:
    """Yield the patches of findings that a running run can make."""
    for finding in findings:
        patch = _as_json(finding.patch)
        undo = undo_of(patch, settings)
        if not patch or undo is None or not all(map(is_changeable, patch)) or not _host_has_room(evidence, patch):
            continue
        # The allocator's settings are judged by time: retries cost some, and the peak of what is allocated stays.
        saves_memory = finding.code in MEMORY_CODES and not patch.keys() <= {*OTHER_CHANGEABLE_FIELDS}
        if finding.gain is None and not saves_memory:
            continue
        gain = finding.gain or 0.0
        yield Proposal(
            patch=patch,
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, (1.2 - finding.confidence) * abs(gain)),
            reason=f"{finding.verdict}; {describe(patch, undo)}",
            finding=finding.code,
            peak_ratio=_peak_ratio(evidence, patch),
            saves_memory=saves_memory,
            is_in_place=_is_in_place(evidence.plan, patch),
            first_step_seconds=_first_step_seconds(evidence.plan, patch),
        )


def _priced(evidence: Evidence, measured: StepBreakdown, patch: Patch, settings: Mapping[str, Any]) -> list[Proposal]:
    """Return the proposal for a patch; none if it cannot run, does not fit, or cannot be predicted."""
    patch = _as_json(patch)
    undo, question = undo_of(patch, settings), evidence.planner_inputs()
    if undo is None or question is None or (changes_course(patch) and not _may_change_course(evidence)):
        return []
    gain = predicted_gain(evidence, measured, patch)
    if gain is None:
        return []
    direction = f"{gain:.0%} shorter" if gain > 0 else f"{-gain:.0%} longer, give or take {MIN_UNCERTAINTY:.0%},"
    return [
        Proposal(
            patch=patch,
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, RELATIVE_UNCERTAINTY * abs(gain)),
            reason=f"{describe(patch, undo)}: steps should be {direction} by the cost model",
            peak_ratio=_peak_ratio(evidence, patch),
            is_in_place=_is_in_place(evidence.plan, patch),
            first_step_seconds=_first_step_seconds(evidence.plan, patch),
        )
    ]


def _peak_ratio(evidence: Evidence, patch: Patch) -> float:
    """Return the predicted peak memory with the patch over that without it; 1 if it cannot be predicted."""
    question = evidence.planner_inputs()
    if question is None or not any(name.startswith("plan.") for name in patch):
        return 1.0
    try:
        changed = plan_with(evidence.plan, patch)
    except ValidationError:
        return 1.0
    now, then = forecast(question, evidence.plan), forecast(question, changed)
    return then.peak_bytes / now.peak_bytes if now.peak_bytes else 1.0


def _saving_memory(evidence: Evidence, settings: Mapping[str, Any]) -> list[Proposal]:
    """Return the change with the shortest step that needs clearly less memory."""
    fix = cheapest_memory_fix(evidence, ran_out=True)
    patch = _as_json(fix.patch) if fix else {}
    undo = undo_of(patch, settings)
    if fix is None or undo is None:
        return []
    return [
        Proposal(
            patch=patch,
            undo=undo,
            gain=fix.gain,
            uncertainty=MIN_UNCERTAINTY,
            reason=f"memory is about to run out: {describe(patch, undo)}; {fix.effect}",
            finding="F061",
            peak_ratio=fix.then.peak_bytes / fix.now.peak_bytes if fix.now.peak_bytes else 1.0,
            saves_memory=True,
            is_in_place=_is_in_place(evidence.plan, patch),
            first_step_seconds=_first_step_seconds(evidence.plan, patch),
        )
    ]


def best_layout(evidence: Evidence) -> Patch:
    """Return the patch to the best plan that computes the same results; empty if the run has it, or none is known.

    The search takes a second or more.
    """
    question, plan = evidence.planner_inputs(), evidence.plan
    if question is None:
        return {}
    pins = Plan.model_validate(_tree(plan, RESULT_FIELDS))
    try:
        answer = search(replace(question, recipe=question.recipe.model_copy(update={"plan": pins}), max_plans=1))
    except (UserError, ValidationError):
        return {}
    if not answer.ranked:
        return {}
    before, after = (settings_of(each, evidence.recipe) for each in (plan, answer.ranked[0]))
    leaves = [name for name, value in after.items() if not isinstance(value, dict)]
    return {name: after[name] for name in leaves if before.get(name) != after[name]}


def _may_change_course(evidence: Evidence) -> bool:
    return evidence.recipe.autopilot.may_change_course


def _course_changes(evidence: Evidence) -> Iterator[Patch]:
    """Yield changes that change the results of training, if the recipe allows them: fewer bits."""
    plan, question = evidence.plan, evidence.planner_inputs()
    if question is None or not _may_change_course(evidence):
        return
    if plan.precision == "fp32" and question.cluster.device.traits.prefers_16_bits:
        yield {"plan.precision": "bf16"}
    if plan.mesh.dp_replicate > 1 and plan.comm.compression == "none" and plan.comm.overlap:
        yield {"plan.comm.compression": "bf16"}


def _host_has_room(evidence: Evidence, patch: Patch) -> bool:
    """Return whether every node has memory for what the patch adds to it: more loader processes.

    A host that runs out of memory kills a process, which may be a rank.
    """
    if "data.workers" not in patch:
        return True
    fractions = [
        used / total
        for each in evidence.samples
        if (used := get_number(each, "ram_used")) and (total := get_number(each, "ram"))
    ]
    return max(fractions[-MAX_HOST_SAMPLES:], default=0.0) < MAX_HOST_MEMORY_FRACTION


def _tree(plan: Plan, fields: Sequence[str]) -> dict[str, Any]:
    """Return these fields of the plan, such as `comm.compression`, as a tree."""
    values = plan.model_dump()
    tree: dict[str, Any] = {}
    for section, _, name in (each.partition(".") for each in fields):
        if name:
            tree.setdefault(section, {})[name] = values[section][name]
        else:
            tree[section] = values[section]
    return tree


def _is_in_place(plan: Plan, patch: Patch) -> bool:
    """Return whether ranks make the change without building networks again."""
    try:
        return is_in_place(plan, plan_with(plan, patch))
    except ValidationError:
        return False


def _first_step_seconds(plan: Plan, patch: Patch) -> float:
    """Return what compiling the blocks of the changed plan takes; torch keeps what it compiled before on disk."""
    if not patch.get("plan.compile", plan.compile) or _is_in_place(plan, patch):
        return 0.0
    return WARM_COMPILE_SECONDS if plan.compile else COMPILE_SECONDS


def _as_json(patch: Mapping[str, Any]) -> Patch:
    """Return the patch as it is read back from a file: lists instead of tuples."""
    return json.loads(json.dumps(patch))


def _key(patch: Mapping[str, Any]) -> str:
    return json.dumps(patch, sort_keys=True)

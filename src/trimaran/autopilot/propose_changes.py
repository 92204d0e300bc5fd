"""The changes that could help a run: the patches of findings, and the neighbours of its plan by the cost model.

Everything is priced against the measured step. What the model knows little about gets a wide uncertainty, so that the
policy may try it where that is cheap.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.predicted_gain import (
    fewer_launches,
    forecast,
    larger_micro_batches,
    predicted_gain,
)
from trimaran.doctor.step_breakdown import StepBreakdown, step_breakdown
from trimaran.planner import search
from trimaran.planner.comm_choices import BUCKET_SIZES_MB
from trimaran.planner.memory_ladder import SHARDING_ORDER, plan_with
from trimaran.planner.neighbours import SCHEDULES

MIN_UNCERTAINTY = 0.05  # of a step: how far the cost model is off even where it predicts no change
RELATIVE_UNCERTAINTY = 0.5  # of a predicted gain
# Findings about memory, not about speed: their patch is taken if memory runs out, whatever it costs in time.
MEMORY_CODES = ("F061", "F062", "F060")
RECOMPUTE_ORDER = ("none", "elementwise", "selective", "full")
SAME_RESULTS = ("precision", "engine")  # plan fields that a search for another layout must keep


def proposals_of(
    evidence: Evidence, findings: Sequence[Finding], *, peak_is_near: bool = False, whole_layout: bool = False
) -> list[Proposal]:
    """Return the changes that could help, each once: those of findings first.

    `peak_is_near`: memory may run out, so changes that save memory are wanted, too. `whole_layout`: also search for
    another mesh, which takes a second or more.
    """
    measured = step_breakdown(evidence)
    if measured is None:
        return []
    settings = settings_of(evidence.plan, evidence.recipe)
    by_patch: dict[str, Proposal] = {}
    for each in _of_findings(findings, settings):
        by_patch.setdefault(_key(each.patch), each)  # the most important finding comes first
    found, known = list(by_patch.values()), {*by_patch}
    for patch in neighbours(evidence.plan):
        if _key(patch) not in known:
            known.add(_key(patch))
            found += _priced(evidence, measured, patch, settings)
    if whole_layout and (layout := _best_layout(evidence)) and _key(layout) not in known:
        found += _priced(evidence, measured, layout, settings)
    if peak_is_near:
        found += _saving_memory(evidence, settings)
    return found


def neighbours(plan: Plan) -> Iterator[Patch]:
    """Yield changes of single fields that compute the same results: more or less of one thing."""
    yield from larger_micro_batches(plan)
    if plan.micro_batch % 2 == 0 and not plan.micro_batches:
        yield {"plan.micro_batch": plan.micro_batch // 2, "plan.grad_accum": plan.grad_accum * 2}
    yield from ({"plan.recompute": each} for each in _less_recompute(plan))
    if plan.offload != "none":
        yield {"plan.offload": "none"}
    yield from _smaller_sharding(plan)
    if plan.mesh.data > 1 and plan.engine == "torch":
        yield from _other_buckets(plan)
    yield from fewer_launches(plan)
    if plan.mesh.pp > 1:
        yield from ({"plan.pipeline.schedule": each} for each in SCHEDULES if each != plan.pipeline.schedule)


def _less_recompute(plan: Plan) -> list[str | int]:
    if plan.recompute == "none":
        return []
    if isinstance(plan.recompute, int):  # every k-th layer
        return ["none", 2 * plan.recompute]
    return list(RECOMPUTE_ORDER[: RECOMPUTE_ORDER.index(plan.recompute)])


def _smaller_sharding(plan: Plan) -> Iterator[Patch]:
    for stage in SHARDING_ORDER[: SHARDING_ORDER.index(plan.sharding)]:
        if stage == "none":
            mesh = {"plan.mesh.dp_replicate": plan.mesh.dp, "plan.mesh.dp_shard": 1}
            yield {"plan.sharding": stage} | (mesh if plan.mesh.dp_shard > 1 else {})
        else:
            yield {"plan.sharding": stage}


def _other_buckets(plan: Plan) -> Iterator[Patch]:
    now = plan.comm.bucket_mb
    nearest = [
        *[each for each in BUCKET_SIZES_MB if each < now][-1:],
        *[each for each in BUCKET_SIZES_MB if each > now],
    ]
    yield from ({"plan.comm.bucket_mb": each} for each in nearest if each <= 100 or each == now * 2)
    if plan.sharding == "parameters":
        yield from ({"plan.comm.prefetch": each} for each in (1, 2, 3) if each != plan.comm.prefetch)


def _of_findings(findings: Iterable[Finding], settings: Mapping[str, Any]) -> Iterator[Proposal]:
    """Yield the patches of findings that a running run can make."""
    for finding in findings:
        patch = _as_json(finding.patch)
        undo = undo_of(patch, settings)
        if not patch or undo is None or not all(map(is_changeable, patch)):
            continue
        saves_memory = finding.code in MEMORY_CODES
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
            saves_memory=saves_memory,
        )


def _priced(evidence: Evidence, measured: StepBreakdown, patch: Patch, settings: Mapping[str, Any]) -> list[Proposal]:
    """Return the proposal for a patch; none if it cannot run, does not fit, or cannot be predicted."""
    patch = _as_json(patch)
    undo, question = undo_of(patch, settings), evidence.planner_inputs()
    if undo is None or question is None or changes_course(patch):
        return []
    gain = predicted_gain(evidence, measured, patch)
    if gain is None:
        return []
    now, then = forecast(question, evidence.plan), forecast(question, plan_with(evidence.plan, patch))
    direction = f"{gain:.0%} shorter" if gain > 0 else f"{-gain:.0%} longer, give or take {MIN_UNCERTAINTY:.0%},"
    return [
        Proposal(
            patch=patch,
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, RELATIVE_UNCERTAINTY * abs(gain)),
            reason=f"{describe(patch, undo)}: steps should be {direction} by the cost model",
            peak_ratio=then.peak_bytes / now.peak_bytes if now.peak_bytes else 1.0,
        )
    ]


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
        )
    ]


def _best_layout(evidence: Evidence) -> Patch:
    """Return the patch to the best plan that computes the same results; empty if the run has it, or none is known."""
    question, plan = evidence.planner_inputs(), evidence.plan
    if question is None:
        return {}
    comm = {"compression": plan.comm.compression, "local_steps": plan.comm.local_steps}
    pins = Plan.model_validate({name: getattr(plan, name) for name in SAME_RESULTS} | {"comm": comm})
    try:
        answer = search(replace(question, recipe=question.recipe.model_copy(update={"plan": pins}), max_plans=1))
    except (UserError, ValidationError):
        return {}
    if not answer.ranked:
        return {}
    before, after = (settings_of(each, evidence.recipe) for each in (plan, answer.ranked[0]))
    leaves = [name for name, value in after.items() if not isinstance(value, dict)]
    return {name: after[name] for name in leaves if before.get(name) != after[name]}


def _as_json(patch: Mapping[str, Any]) -> Patch:
    """Return the patch as it is read back from a file: lists instead of tuples."""
    return json.loads(json.dumps(patch))


def _key(patch: Mapping[str, Any]) -> str:
    return json.dumps(patch, sort_keys=True)

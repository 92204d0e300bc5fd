"""The changes that could help a run: the patches of findings, and the neighbours of its plan by the cost model.

Everything is priced against the measured step. What the model knows little about gets a wide uncertainty, so that the
policy may try it where that is cheap.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import ValidationError

from trimaran.autopilot.policy import Patch, Proposal, changes_course, describe, is_changeable, settings_of, undo_of
from trimaran.core import Decision, Finding, Plan, UserError
from trimaran.core.autopilot_section import OTHER_CHANGEABLE_FIELDS
from trimaran.doctor import Evidence, forecast, predicted_gain
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.rules.balance import slow_rank
from trimaran.doctor.step_breakdown import MIN_STEPS, get_number, steady_steps, step_breakdown
from trimaran.launch.supervise.next_attempt import resized
from trimaran.planner import check_micro_batches, neighbour_patches, plan_with, search
from trimaran.planner.change_plan import RESULT_FIELDS, is_in_place
from trimaran.runs.node_records import LEFT_OUT_FIELD, has_recovered, speedup_of

MIN_UNCERTAINTY = 0.05  # of a step: how far the cost model is off even where it predicts no change
MIN_RETURN_GAIN = 0.05  # of a step, for a start of all ranks
SLOW_RATIO, SLOW_RANKS = "slow_ratio", "slow_ranks"  # of a decision's baseline


def without_slow_node(
    evidence: Evidence, settings: Mapping[str, Any], *, instead: Sequence[Proposal] = ()
) -> list[Proposal]:
    """Return the proposal to leave the slowest rank's node out; none if the recipe or the planner do not allow it.

    The others do its work: the global batch stays. `instead` are other answers to the slow rank, which keep the node:
    leaving it out must be better than these.
    """
    slow, measured, plan = slow_rank(evidence), step_breakdown(evidence), evidence.plan
    starts = evidence.events_of_kind("start")
    newest = max((int(each.get("attempt") or 0) for each in starts), default=0)
    hosts = {
        int(each["rank"]): str(each["data"]["host"])
        for each in starts
        if each.get("attempt") == newest and isinstance(each.get("data"), dict) and "host" in each["data"]
    }
    if slow is None or measured is None or LEFT_OUT_FIELD not in settings or slow.rank not in hosts:
        return []
    host, size = hosts[slow.rank], plan.mesh.world_size
    left = size - sum(each == host for each in hosts.values())
    fewest = evidence.recipe.faults.ranks[0] if evidence.recipe.faults.ranks else size
    if not fewest <= left < size or resized(plan, evidence.recipe, left) is None:
        return []
    compute = measured.compute + measured.straggler  # of the slowest rank
    gain = compute * (1 - size / left / slow.ratio) / measured.step
    if gain <= max((each.gain for each in instead), default=0.0):
        return []
    undo: dict[str, Any] = {LEFT_OUT_FIELD: settings[LEFT_OUT_FIELD]}
    return [
        Proposal(
            patch={LEFT_OUT_FIELD: sorted({*settings[LEFT_OUT_FIELD], host})},
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, gain / 3),
            reason=f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others; leave {host} out: "
            f"{left} of {size} ranks go on",
            finding="F005",
            is_measured=True,
            facts={SLOW_RATIO: slow.ratio, SLOW_RANKS: size - left},
        )
    ]


def with_recovered_node(
    evidence: Evidence,
    settings: Mapping[str, Any],
    *,
    decisions: Sequence[Decision],
    speeds: Mapping[str, Sequence[float]],
) -> list[Proposal]:
    """Return the proposals to take left-out nodes back that are clearly faster than when they were left out.

    `speeds` are measured while the nodes are idle, see `node_records.py`. A node that a person has left out stays out.
    """
    measured, plan, recipe = step_breakdown(evidence), evidence.plan, evidence.recipe
    left_out, now, found = settings.get(LEFT_OUT_FIELD, []), plan.mesh.world_size, list[Proposal]()
    if measured is None:
        return []
    for host in left_out:
        kept = [each for each in decisions if each.outcome == "kept" and host in each.patch.get(LEFT_OUT_FIELD, ())]
        # None if a person left the node out.
        cause = next((each for each in reversed(kept) if host not in each.undo[LEFT_OUT_FIELD]), None)
        if cause is None or not has_recovered(speeds.get(host, ())):
            continue
        size = now + int(cause.baseline.get(SLOW_RANKS, 0))
        fewest, most = recipe.faults.ranks or (size, size)
        if size == now or not fewest <= size <= most or resized(plan, recipe, size) is None:
            continue
        speedup = speedup_of(speeds[host])
        ratio = max(1.0, cause.baseline.get(SLOW_RATIO, 1.0) / speedup)  # of its compute to that of the others
        gain = measured.compute * (1 - now / size * ratio) / measured.step
        if gain < MIN_RETURN_GAIN:
            continue
        found.append(
            Proposal(
                patch={LEFT_OUT_FIELD: sorted({*left_out} - {host})},
                undo={LEFT_OUT_FIELD: [*left_out]},
                gain=gain,
                uncertainty=max(MIN_UNCERTAINTY, gain / 2),
                reason=f"{host} computes {speedup:.1f} times as fast as when decision {cause.id} left it out; take it "
                f"back: {size} ranks instead of {now}",
                finding="F005",
                is_measured=True,
            )
        )
    return found


FIELD = "plan.micro_batches"
MAX_DIFFERENCE = 1.2  # times, between the speeds of ranks that count as equally fast


def rows_by_speed(evidence: Evidence, settings: Mapping[str, Any]) -> list[Proposal]:
    """Return the rows that one slow rank asks for, or none. The global batch stays, and with it the results."""
    plan, slow, measured = evidence.plan, slow_rank(evidence), step_breakdown(evidence)
    if measured is None or plan.mesh.dp == 1 or plan.mesh.pp > 1 or FIELD not in settings:
        return []
    if plan.rows_by_rank and _are_alike(evidence):
        rows, undo = plan.rows_by_rank, {FIELD: settings[FIELD]}
        gain = (1 - sum(rows) / len(rows) / max(rows)) * (measured.compute + measured.straggler) / measured.step
        reason = f"all ranks take equally long for a row; {describe({FIELD: []}, undo)}"
        known: dict[str, Any] = {"gain": gain, "uncertainty": max(MIN_UNCERTAINTY, gain / 3), "reason": reason}
        return [Proposal(patch={FIELD: []}, undo=undo, is_measured=True, is_in_place=True, **known)] if gain > 0 else []
    if slow is None:
        return []
    number = slow.rank // (plan.mesh.tp * plan.mesh.cp)
    now = plan.rows_by_rank or (plan.micro_batch,) * plan.mesh.dp
    others = [rows for index, rows in enumerate(now) if index != number]
    row_seconds, slow_row_seconds = slow.usual / (sum(others) / len(others)), slow.most / now[number]
    rows = deal_by_speed(sum(now), plan.mesh.dp, number, slow_row_seconds / row_seconds)
    then = max(each * (slow_row_seconds if index == number else row_seconds) for index, each in enumerate(rows))
    patch: Patch = {FIELD: [] if len({*rows}) == 1 else rows}
    undo = {FIELD: settings[FIELD]}
    gain = (1 - then / slow.most) * (measured.compute + measured.straggler) / measured.step
    if patch == undo or gain <= 0:
        return []
    try:
        check_micro_batches(plan.model_copy(update={"micro_batches": tuple(patch[FIELD])}))
    except UserError:
        return []
    return [
        Proposal(
            patch=patch,
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, gain / 3),
            reason=f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others; {describe(patch, undo)}",
            finding="F005",
            is_measured=True,
            is_in_place=True,
        )
    ]


def _are_alike(evidence: Evidence) -> bool:
    """Return whether ranks with unequal rows take equally long for a row: then the slow one has recovered."""
    busy = [each["ranks"]["busy_seconds"] for each in steady_steps(evidence) if "busy_seconds" in each.get("ranks", {})]
    ratios = [least / most for each in busy if (least := each.get("min")) and (most := each.get("max"))]
    if len(ratios) < MIN_STEPS:
        return False
    expected = min(evidence.plan.rows_by_rank) / max(evidence.plan.rows_by_rank)
    return expected / MAX_DIFFERENCE < median(ratios) < expected * MAX_DIFFERENCE


def deal_by_speed(total: int, num_ranks: int, slow: int, slowdown: float) -> list[int]:
    """Return the rows of each data rank, at least one, with which the last one is done earliest.

    The data rank `slow` takes `slowdown` times as long for a row as the others.
    """

    def seconds(rows: int) -> float:
        return max(rows * slowdown, -((rows - total) // (num_ranks - 1)))  # the others round up

    fewest = min(range(1, total - num_ranks + 2), key=seconds)
    each, more = divmod(total - fewest, num_ranks - 1)
    others = iter([each + 1] * more + [each] * (num_ranks - 1 - more))
    return [fewest if index == slow else next(others) for index in range(num_ranks)]


MAX_HOST_MEMORY_FRACTION = 0.9  # in use, above which no loader processes are added
MAX_HOST_SAMPLES = 64  # of the nodes, the most recent ones
COMPILE_SECONDS, WARM_COMPILE_SECONDS = 30.0, 10.0  # assumed; 37 s on the 2 busy cores of the test machine
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
    for finding in findings:
        patch = _as_json(finding.patch)
        undo = undo_of(patch, settings)
        if not patch or undo is None or not all(map(is_changeable, patch)):
            continue
        if "data.workers" in patch:  # a host that runs out of memory kills a process, which may be a rank
            samples = ((get_number(each, "ram_used"), get_number(each, "ram")) for each in evidence.samples)
            fractions = [used / total for used, total in samples if used and total]
            if max(fractions[-MAX_HOST_SAMPLES:], default=0.0) >= MAX_HOST_MEMORY_FRACTION:
                continue
        # The allocator's settings are judged by time: retries cost some, and the peak of what is allocated stays.
        saves_memory = finding.code in MEMORY_CODES and not patch.keys() <= {*OTHER_CHANGEABLE_FIELDS}
        if finding.gain is None and not saves_memory:
            continue
        gain = finding.gain or 0.0
        proposal = _predicted(
            evidence,
            patch,
            undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, (1.2 - finding.confidence) * abs(gain)),
            reason=f"{finding.verdict}; {describe(patch, undo)}",
            finding=finding.code,
            saves_memory=saves_memory,
        )
        by_patch.setdefault(_key(patch), proposal)  # the most important finding comes first
    found, known = list(by_patch.values()), {*by_patch}
    question = evidence.planner_inputs()
    candidates = [*neighbour_patches(evidence.plan, question, far=True)] if question else []
    if question and evidence.recipe.autopilot.may_change_course:  # fewer bits, which change the results of training
        plan = evidence.plan
        if plan.precision == "fp32" and question.cluster.device.traits.prefers_16_bits:
            candidates.append(("precision", {"plan.precision": "bf16"}))
        if plan.mesh.dp_replicate > 1 and plan.comm.compression == "none" and plan.comm.overlap:
            candidates.append(("compression", {"plan.comm.compression": "bf16"}))
    for kind, patch in [*candidates, *([("layout", layout)] if layout else [])]:
        if _key(patch) not in known:
            known.add(_key(patch))
            patch = _as_json(patch)
            undo, may_change_course = undo_of(patch, settings), evidence.recipe.autopilot.may_change_course
            if undo is None or question is None or (changes_course(patch) and not may_change_course):
                continue
            gain = predicted_gain(evidence, measured, patch)
            if gain is None:  # it cannot run, does not fit, or cannot be predicted
                continue
            direction = (
                f"{gain:.0%} shorter" if gain > 0 else f"{-gain:.0%} longer, give or take {MIN_UNCERTAINTY:.0%},"
            )
            uncertainty = max(MIN_UNCERTAINTY, RELATIVE_UNCERTAINTY * abs(gain))
            reason = f"{describe(patch, undo)}: steps should be {direction} by the cost model"
            proposal = _predicted(evidence, patch, undo, gain=gain, uncertainty=uncertainty, reason=reason)
            if kind not in MEMORY_FOR_TIME or proposal.peak_ratio >= 1:
                found.append(proposal)
    fix = cheapest_memory_fix(evidence, ran_out=True) if peak_is_near else None
    patch = _as_json(fix.patch) if fix else {}
    undo = undo_of(patch, settings)
    if fix is not None and undo is not None:
        found.append(
            _predicted(
                evidence,
                patch,
                undo,
                gain=fix.gain,
                uncertainty=MIN_UNCERTAINTY,
                reason=f"memory is about to run out: {describe(patch, undo)}; {fix.effect}",
                finding="F061",
                peak_ratio=fix.peak_ratio,
                saves_memory=True,
            )
        )
    return found


def _predicted(evidence: Evidence, patch: Patch, undo: Patch, **known: Any) -> Proposal:
    """Return the proposal for a patch, with `known` and what the planner tells of the changed plan."""
    plan, question = evidence.plan, evidence.planner_inputs()
    peak_ratio, in_place, first_step_seconds = 1.0, False, 0.0
    with contextlib.suppress(ValidationError):
        changed = plan_with(plan, patch)
        in_place = is_in_place(plan, changed)
        if question is not None and any(name.startswith("plan.") for name in patch):
            now, then = forecast(question, plan), forecast(question, changed)
            peak_ratio = then.peak_bytes / now.peak_bytes if now.peak_bytes else 1.0
    if patch.get("plan.compile", plan.compile) and not in_place:  # torch keeps what it compiled before on disk
        first_step_seconds = WARM_COMPILE_SECONDS if plan.compile else COMPILE_SECONDS
    known = {"peak_ratio": peak_ratio, **known}
    place: dict[str, Any] = {"is_in_place": in_place, "first_step_seconds": first_step_seconds}
    return Proposal(patch=patch, undo=undo, **place, **known)


def best_layout(evidence: Evidence) -> Patch:
    """Return the patch to the best plan that computes the same results; empty if the run has it, or none is known.

    The search takes a second or more.
    """
    question, plan = evidence.planner_inputs(), evidence.plan
    if question is None:
        return {}
    # These fields of the plan, such as `comm.compression`, as a tree.
    values = plan.model_dump()
    tree: dict[str, Any] = {}
    for section, _, name in (each.partition(".") for each in RESULT_FIELDS):
        if name:
            tree.setdefault(section, {})[name] = values[section][name]
        else:
            tree[section] = values[section]
    pins = Plan.model_validate(tree)
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

"""Rows by measured speed: if one rank computes more slowly than the others, it gets fewer rows of each micro-batch."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trimaran.autopilot.proposal import Patch, Proposal, describe
from trimaran.core import Plan, UserError
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.rules.balance import slow_computer
from trimaran.doctor.step_breakdown import MIN_STEPS, StepBreakdown, steady_steps, step_breakdown
from trimaran.planner.rules.replica_rules import check_micro_batches

FIELD = "plan.micro_batches"
MIN_UNCERTAINTY = 0.05  # of a step
MAX_DIFFERENCE = 1.2  # times, between the speeds of ranks that count as equally fast


def rows_by_speed(evidence: Evidence, settings: Mapping[str, Any]) -> list[Proposal]:
    """Return the change of rows that one slow rank asks for; none if there is no slow rank, or no better deal.

    The global batch stays, and with it the results.
    """
    plan, slow, measured = evidence.plan, slow_computer(evidence), step_breakdown(evidence)
    if measured is None or plan.mesh.dp == 1 or plan.mesh.pp > 1 or FIELD not in settings:
        return []
    if plan.rows_by_rank and _are_alike(evidence):
        return _equal_rows(plan, measured, settings)
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
    if patch == undo or gain <= 0 or not _is_allowed(plan, patch[FIELD]):
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


def _equal_rows(plan: Plan, measured: StepBreakdown, settings: Mapping[str, Any]) -> list[Proposal]:
    rows, undo = plan.rows_by_rank, {FIELD: settings[FIELD]}
    gain = (1 - sum(rows) / len(rows) / max(rows)) * (measured.compute + measured.straggler) / measured.step
    reason = f"all ranks take equally long for a row; {describe({FIELD: []}, undo)}"
    known: dict[str, Any] = {"gain": gain, "uncertainty": max(MIN_UNCERTAINTY, gain / 3), "reason": reason}
    return [Proposal(patch={FIELD: []}, undo=undo, is_measured=True, is_in_place=True, **known)] if gain > 0 else []


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


def _is_allowed(plan: Plan, rows: Sequence[int]) -> bool:
    try:
        check_micro_batches(plan.model_copy(update={"micro_batches": tuple(rows)}))
    except UserError:
        return False
    return True

"""Shows the decisions of a run's autopilot as a table, and one of them in lines."""

import shlex

from rich.text import Text

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.run_state import ACTIVE_STATUSES, Status
from trimaran.app.show.text_chart import GREEN, ORANGE, RED, SKY
from trimaran.autopilot import describe
from trimaran.core import Decision, show_seconds
from trimaran.runs import RunDirectory

STYLES = {"kept": GREEN, "rolled-back": ORANGE, "refused": RED, "failed": RED, "trying": SKY, "advised": SKY}


def decision_lines(decision: Decision, run: RunDirectory, status: Status) -> list[Text]:
    """Return a decision in lines that can be copied: outcome, change, reason, expected and measured effect."""
    head = Text.assemble(
        (f"{decision.id:>3} ", "bold"),
        (f"{decision.outcome:<12}", f"bold {STYLES.get(decision.outcome, '')}".strip()),
        f"step {decision.step}  {describe(decision.patch, decision.undo)}",
    )
    rows = {"why": decision.reason, "expected": _expected(decision), "measured": _measured(decision)}
    if decision.outcome == "advised":
        rows["apply"] = command_of_decision(decision, run, status)
    return [head, *(Text(f"    {name + ':':<10}{text}") for name, text in rows.items() if text)]


def command_of_decision(decision: Decision, run: RunDirectory, status: Status) -> str:
    """Return the command that makes a decision's change, or takes a kept one back: replan, resume or train."""
    from trimaran.doctor.predicted_gain import patch_settings

    kept, is_active = decision.outcome == "kept", status in ACTIVE_STATUSES
    if kept and is_active:
        return shlex.join([program_name(), "decisions", path_argument(run.location), "--undo", str(decision.id)])
    patch = decision.undo if kept else decision.patch
    settings = [part for each in patch_settings(patch) for part in ("--set", each)]
    verb, path = ("replan" if is_active else "resume"), run.location
    if status == "done":
        verb, path = "train", path / run.recipe.name
    return shlex.join([program_name(), verb, path_argument(path), *settings])


def last_decision_text(decision: Decision) -> str:
    """Return a decision in one line, for the live view and the report."""
    effect = _measured(decision) or f"expected: {_expected(decision)}"
    return f"{decision.id} {decision.outcome}: {describe(decision.patch, decision.undo)} ({effect})"


def _expected(decision: Decision) -> str:
    gain, error = decision.expected.get("gain"), decision.expected.get("uncertainty")
    if gain is None:
        return ""
    before = decision.baseline.get("step_seconds")
    seconds = f" than {show_seconds(before)}" if before else ""
    margin = f" (give or take {error:.0%})" if error else ""
    return f"steps {abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'}{seconds}{margin}"


def _measured(decision: Decision) -> str:
    measured = decision.measured or {}
    if "gain" not in measured:
        return ""
    gain, steps = measured["gain"], measured.get("steps", 0)
    confidence = measured.get("confidence", 0.0)
    sure = f"{confidence:.1%} sure that they are shorter" if gain >= 0 else f"{1 - confidence:.1%} sure"
    pause = f", {show_seconds(measured['pause_seconds'])} of pauses" if measured.get("pause_seconds") else ""
    return f"steps {abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'} over {steps:.0f} steps, {sure}{pause}"

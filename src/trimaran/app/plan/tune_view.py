"""Shows a tuning: a live line while trials run, then a table of what was measured and what was not tried."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from trimaran.app.machine.calibrate_runs import CalibrateAnswer
from trimaran.app.runs.live import print_plain
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import Plan, show_bytes, show_seconds
from trimaran.planner.measure.fit_rates import median_error
from trimaran.planner.measure.trial_record import MeasuredTrial, TriedCandidate, TuneCandidate
from trimaran.planner.measure.tuner import TuneResult

MAX_NOT_TRIED = 10
COLUMNS = ("predicted", "measured", "±", "steps", "memory", "plan: what differs from the first choice")
SHOWN_SETTINGS = ("sharding", "recompute", "offload", "loss", "compile", "cuda_graphs")


class TuneProgress:
    """A live line on a terminal, and a line for each trial that has ended."""

    def __init__(self, console: Console, first: Plan) -> None:
        self._console, self._first = console, first
        self._status = console.status("preparing")
        self._number, self._head = 0, ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def starting(self, candidate: TuneCandidate, *, why: str, best: TriedCandidate | None, left: float) -> None:
        self._number += 1
        shown = f"best {_step(best.seconds)}, " if best and best.seconds else ""
        self._head = f"trial {self._number}: {describe(candidate, self._first)} ({why}); {shown}"
        self._head += f"{show_seconds(max(0.0, left))} left"
        self._status.update(self._head)

    def steps(self, seconds: Sequence[float]) -> None:
        if seconds and self._console.is_terminal:
            self._status.update(f"{self._head}; step {len(seconds)}: {_step(seconds[-1])}")

    def finished(self, record: MeasuredTrial, candidate: TuneCandidate) -> None:
        result = record.outcome if not record.has_time else _measured(record)
        reason = f": {record.reason}" if record.reason else ""
        name = describe(candidate, self._first)
        print_plain(
            self._console, f"{self._number:3}  {show_seconds(record.trial_seconds):>7}  {result}{reason}  {name}"
        )


def describe(candidate: TuneCandidate, first: Plan) -> str:
    """Return a candidate as text: what differs from the planner's first choice."""
    plan = candidate.plan
    parts = [str(plan.mesh)] if plan.mesh != first.mesh else []
    if (plan.micro_batch, plan.grad_accum) != (first.micro_batch, first.grad_accum):
        parts.append(f"micro-batch {plan.micro_batch} x {plan.grad_accum}")
    changed = [field for field in SHOWN_SETTINGS if getattr(plan, field) != getattr(first, field)]
    parts += [_setting(field, getattr(plan, field)) for field in changed]
    if plan.mesh.pp > 1 and plan.pipeline != first.pipeline:
        parts.append(plan.pipeline.schedule)
    parts += [_setting(field, value) for field, value in plan.comm if value != getattr(first.comm, field)]
    if candidate.origin == "loader processes":
        parts.append(f"loader processes {candidate.workers}")
    return ", ".join(parts) or "the planner's first choice"


def _setting(field: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{field} {'on' if value else 'off'}"
    name = "shard" if field == "sharding" else field
    return f"{name} every {value}" if field == "recompute" and isinstance(value, int) else f"{name} {value}"


def show_tuning(result: TuneResult, first: Plan, console: Console) -> None:
    """Print what was tried, fastest first, and what was not. Rows are never cut."""
    console.print(Text.assemble(("the planner's first choice  ", "dim"), str(first)), soft_wrap=True)
    console.print()
    rows: list[tuple[tuple[str, ...], str]] = [(COLUMNS, "dim")]
    for each in sorted(result.tried, key=lambda each: each.seconds or float("inf")):
        style = f"bold {GREEN}" if each is result.best else RED if each.seconds is None else ""
        rows.append((_row(each, result, first), style))
    left = [(each.candidate, _expected(each.seconds, each.gain, result)) for each in result.proposals]
    left += [(each.candidate, each.why) for each in result.left_out]
    for candidate, why in left[:MAX_NOT_TRIED]:
        cells = (_step(candidate.predicted_seconds), "-", "", "", "", f"{describe(candidate, first)}; not tried: {why}")
        rows.append((cells, "dim"))
    widths = [max(map(len, column)) for column in zip(*(row for row, _ in rows), strict=True)]
    for cells, style in rows:
        figures = [text.rjust(width) for text, width in zip(cells[:-1], widths, strict=False)]
        console.print(Text("  ".join([*figures, cells[-1]]), style=style), soft_wrap=True)
    if (more := len(left) - MAX_NOT_TRIED) > 0:
        console.print(Text(f"and {more:,} more that were not tried; --json lists them", style="dim"))
    console.print()
    console.print(Text(f"stopped after {show_seconds(result.seconds)}: {result.why}"), soft_wrap=True)


def _expected(seconds: float, gain: float, result: TuneResult) -> str:
    reason = {"time": "time was over", "interrupted": "interrupted"}.get(result.stopped, "too little to expect")
    return f"{reason}; expected {_step(seconds)}" + (f", gain {gain:.1%}" if gain < 1 else "")


def _row(each: TriedCandidate, result: TuneResult, first: Plan) -> tuple[str, ...]:
    notes = [describe(each.candidate, first)]
    notes += ["the best"] if each is result.best else []
    notes += [f"{each.num_trials} trials"] if each.num_trials > 1 else []
    notes += [each.outcome] if each.outcome != "measured" else []
    return (
        _step(each.candidate.predicted_seconds),
        _step(each.seconds) or "-",
        f"{each.sigma:.1%}" if each.seconds else "",
        f"{each.num_steps}" if each.seconds else "",
        show_bytes(each.peak_bytes) if each.peak_bytes else "",
        "; ".join(notes) + (f": {each.reason}" if each.reason else ""),
    )


def show_gain(result: TuneResult, console: Console) -> None:
    """Print how much faster the best plan is than the planner's first choice."""
    if result.best is None or result.gain is None or result.first is None:
        return
    if result.best is result.first:
        console.print(Text("the planner's first choice is the fastest of those that were measured"))
        return
    error = (result.best.sigma**2 + result.first.sigma**2) ** 0.5
    console.print(Text.assemble((f"{result.gain:.1%} less time a step", f"bold {GREEN}"), f" (± {error:.1%}) than the "
                                f"planner's first choice: {_step(result.best.seconds)} instead of "
                                f"{_step(result.first.seconds)}"), soft_wrap=True)  # fmt: skip


def show_refit(answer: CalibrateAnswer | None, trouble: str, console: Console) -> None:
    """Print what the trials say about the planner's rates."""
    if answer is None:
        console.print(Text(f"calibration: as it was: {trouble}", style="dim"), soft_wrap=True)
        return
    for fit in answer.fits:
        before, after = median_error(fit.result.before), median_error(fit.result.after)
        text = f"calibration of {fit.device}: median error of {len(fit.observed)} plans {before:.1%} before"
        text += f", {after:.1%} after; written to {fit.path}" if fit.calibration else ", and no rate makes it smaller"
        console.print(Text(text), soft_wrap=True)


def tuning_as_dict(result: TuneResult) -> dict[str, Any]:
    """Return what `--json` prints about the trials."""
    not_tried = [
        _candidate_dict(each.candidate) | {"expected_seconds": each.seconds, "expected_sigma": each.sigma,
                                           "expected_gain": each.gain if each.gain < 1 else None,
                                           "why": result.stopped}
        for each in result.proposals
    ]  # fmt: skip
    not_tried += [_candidate_dict(each.candidate) | {"why": each.why} for each in result.left_out]
    return {
        "stopped": result.stopped,
        "why": result.why,
        "seconds": result.seconds,
        "new_trials": result.num_new,
        "gain": result.gain,
        "first": _tried_dict(result.first) if result.first else None,
        "best": _tried_dict(result.best) if result.best else None,
        "tried": [_tried_dict(each) for each in result.tried],
        "not_tried": not_tried,
    }


def _candidate_dict(candidate: TuneCandidate) -> dict[str, Any]:
    prediction = candidate.plan.prediction
    return {
        "key": candidate.key,
        "plan": candidate.plan.model_dump(mode="json"),
        "text": str(candidate.plan),
        "workers": candidate.workers,
        "origin": candidate.origin,
        "predicted": {"step_seconds": prediction.step_seconds, "peak_bytes": prediction.peak_bytes,
                      "error": prediction.error} if prediction else None,
    }  # fmt: skip


def _tried_dict(each: TriedCandidate) -> dict[str, Any]:
    figures = {"step_seconds": each.seconds, "relative_error": each.sigma, "steps": each.num_steps,
               "trials": each.num_trials, "peak_bytes": each.peak_bytes}  # fmt: skip
    return _candidate_dict(each.candidate) | {
        "outcome": each.outcome,
        "reason": each.reason,
        "measured": figures if each.seconds else None,
        "runs": list(each.runs),
    }


def _measured(record: MeasuredTrial) -> str:
    figures = record.measured or {}
    return f"{_step(record.step_seconds)} ± {figures.get('sigma', 0.0):.1%}"


def _step(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

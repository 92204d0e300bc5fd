"""The panel of a run in a terminal: a pure function of its state."""

import io
import math
import time
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimaran.app.runs.run_state import RunState
from trimaran.app.show.text_chart import (
    BLUE,
    DOTS_PER_CELL,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    curve,
    intervals,
    stacked_bar,
)
from trimaran.core import predicted_comm, show_bytes, show_count, show_seconds

WIDE_COLUMNS = 118
CURVE_ROWS = 6
MIN_CURVE_ROWS = 3

STATUS_COLORS = {
    "starting": ORANGE,
    "training": SKY,
    "restarting": ORANGE,
    "done": GREEN,
    "stopped": ORANGE,
    "failed": RED,
    "vanished": RED,
}
PHASE_COLORS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "comm": RED, "optimizer": GREEN, "checkpoint": PURPLE}


def draw(state: RunState, *, width: int, height: int | None = None, extra: Sequence[Text] = ()) -> RenderableType:
    """Return the run as a panel with `extra` lines at its end; in a small window the curve shrinks first."""
    rows, lines = CURVE_ROWS + 2 if width >= WIDE_COLUMNS else CURVE_ROWS, list(extra)
    if height is not None and lines:
        drawn = Console(width=width, file=io.StringIO()).render_lines(_panel(state, width, rows, []))
        others = len(drawn) - rows + 1
        rows = max(MIN_CURVE_ROWS, min(rows, height - others - len(lines)))
        limit = max(1, height - others - rows)
        if len(lines) > limit:
            hidden = len(lines) - limit + 1
            lines = [*lines[: limit - 1], Text(f"... {hidden} more in a taller window", style="dim")]
    return _panel(state, width, rows, lines)


def _panel(state: RunState, width: int, rows: int, lines: Sequence[Text]) -> RenderableType:
    inner = width - 4
    parts: list[RenderableType] = [Text(str(state.plan), style="dim"), _progress(state, inner)]
    if state.steps and width >= WIDE_COLUMNS:
        half = (inner - 3) // 2
        columns = Table.grid(padding=(0, 3, 0, 0))
        columns.add_column(width=half + 3)
        columns.add_column(width=inner - half - 3)
        left = Group(_losses(state), *_curve(state, half, rows))
        columns.add_row(left, Group(_numbers(state), Text(), *_phases(state, half), Text(), _comparison(state)))
        parts += [Text(), columns]
    elif state.steps:
        parts += [Text(), _losses(state), *_curve(state, inner, rows), Text(), _numbers(state)]
        gap = [] if state.comm_seconds else [Text()]  # 24 rows are enough for everything
        parts += [*_phases(state, inner), *gap, _comparison(state)]
    parts += [Text(), *lines] if lines else []
    color = STATUS_COLORS[state.status]
    title = Text.assemble((state.recipe.name, "bold"), " ", (state.status, color))
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(str(state.run.path), style="dim"),
                 subtitle_align="right", border_style=color, box=box.ROUNDED, width=width)  # fmt: skip


def line(state: RunState) -> str:
    """Return the run in one line of plain text, for logs and pipes."""
    if not state.steps:
        return _readiness(state)
    last = state.steps[-1]
    parts = [
        f"step {last.step}/{state.recipe.train.steps}",
        f"loss {last.loss:.4f}",
        f"{show_count(last.tokens_per_second)} {state.unit}/s",
        f"lr {last.lr:.2e}",
        f"grad norm {last.grad_norm:.2f}",
        show_bytes(last.peak_bytes),
    ]
    if remaining := state.remaining_seconds:
        parts.append(f"{show_seconds(remaining)} left")
    return "  ".join(parts)


def difference(measured: float, predicted: float, *, error: float) -> Text:
    """Return the relative error of a prediction; with a tick if it is within its own error bar."""
    if predicted <= 0:
        return Text("-", style="dim")
    off = measured / predicted - 1
    within = abs(off) <= error
    return Text(f"{off:+.0%} {'✓' if within else '!'}", style=GREEN if within else RED)


def _progress(state: RunState, width: int) -> RenderableType:
    if not state.steps:
        return Text(_readiness(state))
    step, total = state.steps[-1].step, state.recipe.train.steps
    text = f"step {step} / {total}"
    if remaining := state.remaining_seconds:
        text += f"   {show_seconds(remaining)} left"
    row = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=total, completed=step, width=max(10, width - len(text) - 4), style="dim",
                      complete_style=SKY, finished_style=GREEN)  # fmt: skip
    row.add_row(bar, text)
    return row


def _readiness(state: RunState) -> str:
    """Return how far the start is: importing torch and compiling take long, and without a message look like a hang."""
    if (compiling := state.compiling) is not None:
        return f"{state.activity}, {show_seconds(time.time() - compiling.time)}"
    return state.activity


def _losses(state: RunState) -> Text:
    extent = state.history.extent("loss")
    best = extent.least[1] if extent else math.nan
    last, first = state.steps[-1].loss, state.first_loss
    text = Text.assemble(("loss ", "dim"), (f"{last:.3f}", "bold"), ("   first ", "dim"), f"{first:.3f}")
    text.append_text(Text.assemble(("   best ", "dim"), f"{best:.3f}"))
    if state.evaluations:
        step, held_out = state.evaluations[-1]
        text.append_text(
            Text.assemble(("   held out ", "dim"), (f"{held_out:.3f}", f"bold {GREEN}"), (f" at {step}", "dim"))
        )
    return text


def _curve(state: RunState, width: int, height: int) -> list[RenderableType]:
    extent = state.history.extent("loss")
    most, least = (extent.most[1], extent.least[1]) if extent else (0.0, 0.0)
    labels = [f"{most:.2f}", *[""] * (height - 2), f"{least:.2f}"]
    margin = max(map(len, labels))
    columns = width - margin - 2
    extents = state.history.extents("loss")
    means = [
        math.fsum(each.total for each in extents[begin:end]) / sum(each.count for each in extents[begin:end])
        for begin, end, _ in intervals([each.count for each in extents], DOTS_PER_CELL * columns)
    ]
    rows = curve(means, width=columns, height=height)
    lines = [
        Text.assemble((f"{label:>{margin}} ", "dim"), ("│", "dim"), (row, SKY))
        for label, row in zip(labels, rows, strict=True)
    ]
    assert state.history.first is not None  # there are steps
    first, last = f"{state.history.first.step}", f"{state.step}"
    axis = first + last.rjust(width - margin - 2 - len(first))
    return [*lines, Text(f"{'':>{margin}}  {axis}", style="dim")]


def _numbers(state: RunState) -> RenderableType:
    last, measured = state.steps[-1], state.measured
    assert measured is not None  # there are steps
    pairs = [
        (f"{state.unit}/s", show_count(last.tokens_per_second), "median", show_count(measured.tokens_per_second)),
        ("lr", f"{last.lr:.2e}", "grad norm", f"{last.grad_norm:.2f}"),
        ("memory", show_bytes(last.peak_bytes), *(("", "") if state.no_mfu else ("mfu", f"{last.mfu:.1%}"))),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(2 * len(pairs)):
        grid.add_column(style="dim" if column % 2 == 0 else "", justify="left" if column % 2 == 0 else "right")
    grid.add_row(*(word for pair in pairs for word in pair[:2]))
    grid.add_row(*(word for pair in pairs for word in pair[2:]))
    details = [Text.assemble((f"{name.replace('_', ' ')}  ", "dim"), text) for name, text in state.details]
    return Group(grid, *details)


def _phases(state: RunState, width: int) -> list[RenderableType]:
    phases = state.phases
    total = sum(phases.values()) or 1.0
    legend = [
        Text.assemble(("■ ", PHASE_COLORS[name]), f"{name} ", (f"{seconds / total:.0%}", "dim"))
        for name, seconds in phases.items()
    ]
    shown: list[RenderableType] = [
        stacked_bar(phases, PHASE_COLORS, width=width),
        Columns(legend, padding=(0, 3, 0, 0)),
    ]
    # The fraction of a step that is exposed communication of each axis, and the prediction; None if unknown.
    measured, predicted = state.comm_seconds, predicted_comm(state.plan)
    expected = state.plan.prediction.step_seconds if state.plan.prediction else 0.0
    texts = []
    for axis, seconds in measured.items():
        before = f" ({predicted[axis] / expected:.0%} predicted)" if expected and axis in predicted else ""
        now = "not measured" if seconds is None else f"{seconds / total:.0%}"
        texts.append(Text.assemble(f"{axis} ", (f"{now}{before}", "dim")))
    line = Text.assemble(("comm by axis  ", "dim"), Text("   ").join(texts))
    line.no_wrap, line.overflow = True, "ellipsis"
    return [*shown, by_axis] if (by_axis := (line if texts else None)) else shown


def _comparison(state: RunState) -> RenderableType:
    predicted, measured = state.plan.prediction, state.measured
    if predicted is None or measured is None:
        return Text("this plan has no prediction", style="dim")
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("predicted", "measured", "difference", "bar"):
        table.add_column(column, justify="right")
    rows = [
        ("step", "step_seconds", show_seconds),
        ("peak memory", "peak_bytes", show_bytes),
        ("tokens/s", "tokens_per_second", show_count),
    ][: 3 if state.unit == "tokens" else 2]  # for scenes, the prediction counts positions
    for label, name, show in rows:
        before, after = getattr(predicted, name), getattr(measured, name)
        error = predicted.error_of(name, after - before)
        bar = f"±{error:.0%}" if name != "tokens_per_second" else ""  # that of the step
        off = difference(after, before, error=error)
        table.add_row(Text(label, style="dim"), show(before), show(after), off, Text(bar, style="dim"))
    return table

"""Prints measured plans, grouped by model and cluster, the fastest first."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.planner.measure.run_index import MeasuredPlan

COLUMNS = ("tokens/s", "step", "mfu", "memory", "predicted", "goodput", "batch", "date", "run", "plan")
NUM_FIGURES = 7  # columns that are aligned to the right

Groups = dict[tuple[str, int, str], list[MeasuredPlan]]
"""Measured plans by model, its number of parameters, and cluster."""


def group_plans(plans: Iterable[MeasuredPlan]) -> Groups:
    """Return the plans by model and cluster, in the order of their names; the fastest plan of each first."""
    groups: Groups = {}
    for each in sorted(plans, key=lambda each: -each.measured.tokens_per_second):
        groups.setdefault((each.model, each.parameters, each.job.cluster), []).append(each)
    return dict(sorted(groups.items()))


def show_history(groups: Groups, console: Console) -> None:
    """Print a table for each model and cluster."""
    for number, ((model, parameters, cluster), plans) in enumerate(groups.items()):
        size = f", {show_count(parameters)} parameters" if parameters else ""
        console.print(Text(f"{chr(10) if number else ''}{model}{size}, on {cluster or 'an unknown cluster'}",
                           style="bold"))  # fmt: skip
        _show_plans(plans, console)


def _show_plans(plans: Sequence[MeasuredPlan], console: Console) -> None:
    """Print a row for each plan. Rows are never cut: paths are there to be copied."""
    rows = [COLUMNS, *map(_row, plans)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [text.rjust(width) if at < NUM_FIGURES else text.ljust(width)
                 for at, (text, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        console.print(Text("  ".join(cells).rstrip(), style="" if number else "dim"), soft_wrap=True)


def _row(plan: MeasuredPlan) -> tuple[str, ...]:
    measured, predicted = plan.measured, plan.predicted
    return (
        show_count(measured.tokens_per_second),
        show_seconds(measured.step_seconds),
        f"{measured.mfu:.0%}" if measured.mfu else "-",
        show_bytes(measured.peak_bytes),
        f"{show_seconds(predicted.step_seconds)} {plan.error:+.0%}" if predicted else "-",
        f"{plan.run.goodput:.0%}",
        f"{plan.job.global_batch} x {plan.job.seq_len}",
        show_date(plan.run.time),
        short_path(plan.run.path),
        plan.layout,
    )


def show_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def short_path(run: str) -> str:
    """Return a path relative to this folder if it is below it."""
    try:
        here = Path.cwd()
    except OSError:
        return run
    return os.path.relpath(run, here) if Path(run).is_relative_to(here) else run

"""Prints what `trimaran calibrate --from` fitted: the runs with their errors, the rates, and what was left out."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.machine.calibrate_runs import CalibrateAnswer, DeviceFit, RateChange
from trimaran.app.show.text_chart import GREEN
from trimaran.core import show_seconds
from trimaran.planner.measure.fit_rates import median_error
from trimaran.planner.measure.run_index import layout_of

MAX_SHOWN_RUNS, MAX_SHOWN_SKIPPED = 20, 10


def show_calibration(answer: CalibrateAnswer, console: Console) -> None:
    """Print the fits by device, and the runs that were not used."""
    for number, fit in enumerate(answer.fits):
        if number:
            console.print()
        _show_fit(fit, console)
    if answer.skipped:
        console.print(Text("\nnot used", style="dim"))
        for run, reason in answer.skipped[:MAX_SHOWN_SKIPPED]:
            console.print(Text(f"- {run}: {reason}"), soft_wrap=True)
        if (more := len(answer.skipped) - MAX_SHOWN_SKIPPED) > 0:
            console.print(Text(f"- and {more:,} more"))


def _show_fit(fit: DeviceFit, console: Console) -> None:
    result = fit.result
    console.print(Text(f"{fit.device}: predicted steps of {len(fit.observed)} measured plans", style="bold"))
    columns = ("run", "plan", "measured", "error before", "after", *(["left out"] if result.left_out else []))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in ("run", "plan") else "right", no_wrap=column != "plan")
    for number, each in enumerate(fit.observed[:MAX_SHOWN_RUNS]):
        errors = [result.before[number], result.after[number], *result.left_out[number : number + 1]]
        seconds = show_seconds(each.found.steps.busy_seconds)
        table.add_row(each.run.path.name, layout_of(each.found.plan), seconds, *map(_signed, errors))
    medians = [result.before, result.after, *([result.left_out] if result.left_out else [])]
    table.add_row("median", "", "", *(f"{median_error(each):.1%}" for each in medians), style="bold")
    console.print(table)
    if (more := len(fit.observed) - MAX_SHOWN_RUNS) > 0:
        console.print(Text(f"and {more:,} more, which the medians include", style="dim"))
    if fit.changes:
        _show_changes(fit, console)
    if result.undetermined and fit.changes:
        names = ", ".join(map(str, result.undetermined))
        console.print(Text(f"as they were, because these runs do not determine them: {names}", style="dim"),
                      soft_wrap=True)  # fmt: skip


def _show_changes(fit: DeviceFit, console: Console) -> None:
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in ("rate", "before", "after", "±", "from"):
        table.add_column(column, justify="left" if column in ("rate", "from") else "right", no_wrap=column != "from")
    for each in fit.changes:
        table.add_row(str(each.parameter), _rate(each.before), Text(f"{_rate(each.after)} {each.unit}", style=GREEN),
                      f"{each.sigma:.0%}", _runs(each, fit))  # fmt: skip
    console.print(table)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _runs(change: RateChange, fit: DeviceFit) -> str:
    every = {str(each.run.path) for each in fit.observed}
    if len(change.runs) == len(every):
        return "all runs" if len(every) > 1 else "the run"
    return f"{len(change.runs)} of {len(every)} runs"


def _signed(error: float) -> str:
    return f"{error:+.1%}"

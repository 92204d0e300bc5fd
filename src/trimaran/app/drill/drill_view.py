"""The results of drills as a table."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.drill.measure import DrillResult


def show_drills(results: Sequence[DrillResult], skipped: Sequence[tuple[str, str]], console: Console) -> None:
    """Print one row for each result, its note below the table, and the faults that were left out."""
    table = Table(box=None, pad_edge=False)
    for title in ("fault", "noticed", "new step", "lost", "cause", "named", "result"):
        table.add_column(title, justify="right" if title in ("noticed", "new step", "lost") else "left")
    for each in results:
        cause = each.cause or "-"
        table.add_row(
            each.fault,
            _seconds(each.detected_seconds),
            _seconds(each.recovered_seconds),
            "-" if each.lost_steps is None else str(each.lost_steps),
            f"{cause} of rank {', '.join(map(str, each.suspects))}" if each.suspects else cause,
            "yes" if each.named else "no",
            Text("passed", style="green") if each.passed else Text("failed", style="bold red"),
        )
    if results:
        console.print(table)
    for each in results:
        if each.note:
            console.print(Text(f"{each.fault}: {each.note}"), soft_wrap=True)
    for fault, why in skipped:
        console.print(Text(f"{fault}: left out: {why}"), soft_wrap=True)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"

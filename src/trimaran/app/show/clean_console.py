"""The rich console of every command: colours are ours, all other control codes are removed."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trimaran.app.show.terminal import printable, raw_stream

if TYPE_CHECKING:
    from trimaran.data import Progress as ProgressCallback


class CleanConsole(Console):
    """Removes control codes from all text; only rich's own reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr. It reads no markup: text in square brackets is shown as it is."""
    file = raw_stream(sys.stderr if stderr else sys.stdout)
    return CleanConsole(file=file, highlight=False, markup=False, emoji=False)


def print_plain(console: Console, text: str) -> None:
    """Print `text` without markup and without wrapping."""
    console.print(Text(text), soft_wrap=True)


def plain_table(*figures: str, texts: Sequence[str] = (), gap: int = 2) -> Table:
    """Return a table without lines: columns of figures, then of texts, with these titles. Neither is ever wrapped."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
    for title in texts:
        table.add_column(title, no_wrap=True)
    return table


@contextmanager
def progress_bar(console: Console) -> "Iterator[ProgressCallback]":
    """Yield a callback that shows progress: a bar on a terminal until it is done, nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking the data", total=1.0, visible=False)

        def report(what: str, fraction: float) -> None:
            bar.update(task, description=what, completed=fraction, visible=True)

        yield report

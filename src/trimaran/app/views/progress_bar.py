"""A bar while data is packed."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trimaran.data import Progress as Report


@contextmanager
def packing_bar(console: Console) -> Iterator[Report]:
    """Yield what `trimaran.data` reports its progress to: a bar on a terminal until it is done, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking at the data", total=1.0, visible=False)

        def report(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share, visible=True)

        yield report

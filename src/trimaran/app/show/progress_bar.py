"""A progress bar for preparing data, verifying and exporting."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trimaran.data import Progress as ProgressCallback


@contextmanager
def progress_bar(console: Console) -> Iterator[ProgressCallback]:
    """Yield a callback that shows progress: a bar on a terminal until it is done, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking the data", total=1.0, visible=False)

        def report(what: str, fraction: float) -> None:
            bar.update(task, description=what, completed=fraction, visible=True)

        yield report

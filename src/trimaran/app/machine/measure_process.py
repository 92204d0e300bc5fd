"""Runs a measuring process of `trimaran.machine.probe` with a progress bar, because only that one imports torch."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trimaran.core import UserError
from trimaran.core.child_process import ChildProcess


def run_measurement(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    console: Console,
    where: str,
    request: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the process measured. It reads `request` and writes JSON lines, see `machine/probe/calibrate.py`.

    Raises UserError if it fails, with its error or the last line of its standard error.
    """
    measured, error = None, ""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        ChildProcess(command, environment=environment) as process,
    ):
        task = bar.add_task("starting torch", total=1.0)
        with contextlib.suppress(BrokenPipeError, EOFError):
            process.send(request or {})
            while True:
                message = process.receive()
                measured, error = message.get("measured", measured), message.get("error", error)
                bar.update(task, description=message.get("doing"), completed=message.get("share"))
        if process.wait() or measured is None:
            why = error or process.last_stderr_line() or "its process was killed"
            raise UserError("C008", f"the measurement failed: {why[:200]}", where=where,
                            fix="try again when nothing else runs here; CUDA_VISIBLE_DEVICES= measures the CPU"
                            )  # fmt: skip
    return measured

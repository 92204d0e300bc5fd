"""Runs a measuring process of `trimaran.machine.probe` with a progress bar, because only that one imports torch."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trimaran.core import UserError


def run_measurement(
    command: Sequence[str], *, environment: Mapping[str, str], console: Console, where: str, request: str = ""
) -> dict[str, Any]:
    """Return what the process measured. It reads `request` and writes JSON lines, see `machine/probe/calibrate.py`.

    Raises UserError if it fails, with its error or the last line of its standard error.
    """
    measured, error = None, ""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryFile("w+") as asked,
    ):
        asked.write(request)
        asked.seek(0)
        task = bar.add_task("starting torch", total=1.0)
        with subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            try:
                for line in process.stdout or ():
                    message = json.loads(line)
                    measured, error = message.get("measured", measured), message.get("error", error)
                    bar.update(task, description=message.get("doing"), completed=message.get("share"))
            except BaseException:  # mostly Ctrl-C
                process.terminate()
                raise
        if process.wait() or measured is None:
            raise _failure(error or _last_line(errors), where)
    return measured


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return lines[-1] if lines else "its process was killed"


def _failure(error: str, where: str) -> UserError:
    return UserError("C008", f"the measurement failed: {error[:200]}", where=where,
                     fix="try again when nothing else runs here; CUDA_VISIBLE_DEVICES= measures the CPU")  # fmt: skip

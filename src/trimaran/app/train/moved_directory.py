"""What `trimaran train` says and returns when its run directory was moved, replaced or deleted under the run."""

import json
import sys
from collections.abc import Callable

import typer

from trimaran.core import EXIT_DONE, UserError
from trimaran.launch.supervise.recovery_policy import EXIT_FAULT
from trimaran.runs import RunDirectory, holds_run
from trimaran.runs.held_directory import HeldDirectory


class MovedDirectoryNotice:
    """Prints once that the run directory was moved or deleted while the run was running."""

    def __init__(self, held: HeldDirectory, show: Callable[[str], None]) -> None:
        self._held, self._show, self._shown = held, show, False

    def check(self) -> bool:
        """Return whether the directory is not at its path any more: files read by path are not those of the run."""
        if self._held.place == "here":
            return False
        if not self._shown:
            self._shown = True
            self._show(f"{self._held.explain(self._held.place)}; {_consequence(self._held)}")
        return True


def moved_run(held: HeldDirectory) -> RunDirectory | None:
    """Return the run at the place that its directory was moved to; None if it is still at its path, or nowhere."""
    if held.check() == "moved" and (where := held.location) is not None and holds_run(where):
        return RunDirectory(where)
    return None


def is_deleted(held: HeldDirectory) -> bool:
    return held.check() == "deleted"


def end_deleted(held: HeldDirectory, code: int, *, as_json: bool) -> int:
    """Print the error of a run whose directory is gone, and return the exit code: never 0, as nothing is left."""
    error: UserError = held.lost_error()
    code = EXIT_FAULT if code == EXIT_DONE else code
    if as_json:
        typer.echo(json.dumps({"error": error.as_dict(), "exit": code}))
    else:
        sys.stderr.write(f"{error}\n")
    return code


def _consequence(held: HeldDirectory) -> str:
    return "stopping" if held.place == "deleted" else "stopping with a checkpoint there"

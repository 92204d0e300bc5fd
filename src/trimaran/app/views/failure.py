"""How a mistake is shown: the one place that turns an error into lines and an exit code."""

import json
import os
import re
import sys
from collections.abc import Sequence

import typer

from trimaran.core import EXIT_USER, UserError


def report(error: Exception, arguments: Sequence[str]) -> int:
    """Show a person's mistake and return 2; raise anything else again, because a fault deserves its traceback."""
    if isinstance(error, typer.TyperException):
        verb = [word for word in arguments[:1] if not word.startswith("-")]
        command = " ".join(["trimaran", *verb])
        # Choices come one to a line, and what pydantic refused with its own preamble.
        what = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
        error = UserError("A001", what, where=f"`{command}`", fix=f"see `{command} --help`")
    if not isinstance(error, UserError):
        raise error
    if os.environ.get("RANK", "0") != "0":
        return EXIT_USER  # under torchrun every rank makes the same mistake; one of them says so
    if "--json" in arguments:
        typer.echo(json.dumps({"error": error.as_dict()}))
    else:
        typer.echo(_lines(error), err=True, color=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
    return EXIT_USER


def _lines(error: UserError) -> str:
    """Return the three lines with a red code; names a person chose may not steer the terminal."""
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "?", str(error))
    return typer.style(error.code, fg="red", bold=True) + text.removeprefix(error.code)

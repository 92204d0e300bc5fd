"""`trimaran predict`: predicts memory and speed of many given plans."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from trimaran.app.recipe.options import complete_lines
from trimaran.core import UserError, did_you_mean
from trimaran.core.regular_files import open_regular_file
from trimaran.planner.predict_bulk import MAX_LINE_BYTES, answer_line, example_text

Questions = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="One JSON object per line: {id, model, cluster, plan, stack}. - is standard input.",
        autocompletion=complete_lines,
    ),
]
Example = Annotated[bool, typer.Option("--example", help="Print a file to start from, and predict nothing.")]
AsLines = Annotated[bool, typer.Option("--json", help="Answer each line with one JSON object, in the same order.")]


def predict(file: Questions = None, example: Example = False, as_json: AsLines = False) -> None:
    """Score many given plans: does it fit, how fast is it. Thousands per second; a bad line never stops the rest.

    \b
    trimaran predict --example > plans.jsonl
    trimaran predict plans.jsonl
    make-plans | trimaran predict - --json | jq -c 'select(.fits)'
    """
    if example:
        typer.echo(example_text(), nl=False)
        return
    if file is None:
        raise UserError("A011", "no file with plans is named", where="FILE",
                        fix="make one with `trimaran predict --example > plans.jsonl`, or name -")  # fmt: skip
    with _open(file) as stream:
        _stream(stream) if as_json else _show(stream)


def _stream(stream: BinaryIO) -> None:
    """Write the answers: flushed one by one if the input is a pipe, in blocks if it is a file."""
    is_pipe, failed, count = not _size(stream), 0, 0
    for answer in _answers(stream):
        sys.stdout.write(json.dumps(answer) + "\n")
        failed, count = failed + ("error" in answer), count + 1
        if is_pipe:
            sys.stdout.flush()
    if failed:
        typer.echo(f'{failed} of {count} lines have an error: see their "error"', err=True)


def _show(stream: BinaryIO) -> None:
    """Print the answers as a table, with a progress bar on a terminal meanwhile."""
    from rich.progress import Progress

    from trimaran.app.plan.predict_view import count_answers, show_answers
    from trimaran.app.show.clean_console import open_console

    console, size = open_console(), _size(stream)
    with Progress(console=console, transient=True, disable=not (size and console.is_terminal)) as bar:
        read = bar.wrap_file(stream, total=size, description="predicting") if size else stream
        tally = count_answers(_answers(read))
    show_answers(tally, console)


def _answers(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, line in _lines(stream):
        yield answer_line(line, number)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield every line with its number, blank ones too; the rest of a line that is too long is skipped."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(MAX_LINE_BYTES + 1)):
            pass
        yield number, line


def _size(stream: BinaryIO) -> int:
    """Return the size of a regular file; 0 for a pipe, whose reader may wait for each answer."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # an in-memory stream without a file descriptor
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _open(file: str) -> Any:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    path = Path(file)
    try:
        if path.is_fifo():  # a process substitution, <(command), is one
            return path.open("rb")
        return open_regular_file(path, follow_links=True)
    except OSError as error:
        near = did_you_mean(file, [str(each) for each in path.parent.glob("*.jsonl")])
        raise UserError("A011", f"the plans cannot be read: {error.strerror}{near}", where=file,
                        fix="name a file with one JSON object per line, or - for standard input") from None  # fmt: skip

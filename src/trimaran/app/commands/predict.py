"""`trimaran predict`: what given plans would cost, in bulk."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from trimaran.app.request.options import complete_lines
from trimaran.core import UserError, nearest
from trimaran.planner.predict_bulk import MAX_LINE_BYTES, answer_line

Questions = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="One JSON object a line: {id, model, cluster, plan, stack}. - is standard input.",
        autocompletion=complete_lines,
    ),
]
AsLines = Annotated[bool, typer.Option("--json", help="Answer each line with one JSON object, in the same order.")]


def predict(file: Questions, as_json: AsLines = False) -> None:
    """Score given plans in bulk: does it fit, how fast is it. Thousands a second; a bad line never stops the rest.

    \b
    trimaran predict plans.jsonl
    make-plans | trimaran predict - --json | jq -c 'select(.fits)'
    """
    with _open(file) as stream:
        _stream(stream) if as_json else _show(stream)


def _stream(stream: BinaryIO) -> None:
    """Write each answer as soon as it is there when somebody waits for it, in blocks when a file is read."""
    waited_for, failed, count = not _size(stream), 0, 0
    for answer in _answers(stream):
        sys.stdout.write(json.dumps(answer) + "\n")
        failed, count = failed + ("error" in answer), count + 1
        if waited_for:
            sys.stdout.flush()
    if failed:
        typer.echo(f'{failed} of {count} lines could not be answered: see their "error"', err=True)


def _show(stream: BinaryIO) -> None:
    """Draw the answers, with a bar on a terminal until they are all there."""
    from rich.console import Console
    from rich.progress import Progress

    from trimaran.app.views.predict_view import count_answers, show_answers

    console, size = Console(highlight=False), _size(stream)
    with Progress(console=console, transient=True, disable=not (size and console.is_terminal)) as bar:
        read = bar.wrap_file(stream, total=size, description="predicting") if size else stream
        tally = count_answers(_answers(read))
    show_answers(tally, console)


def _answers(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, line in _lines(stream):
        yield answer_line(line, number)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield every line with its number, blank ones too; of one that is too long the rest is passed over."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(MAX_LINE_BYTES + 1)):
            pass
        yield number, line


def _size(stream: BinaryIO) -> int:
    """Return the bytes of a plain file; 0 for a pipe, at whose end somebody may wait."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # a stream of this process, without a file behind it
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _open(file: str) -> Any:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    path = Path(file)
    try:
        return path.open("rb")
    except OSError as error:
        near = nearest(file, [str(each) for each in path.parent.glob("*.jsonl")])
        raise UserError("A011", f"the plans cannot be read: {error.strerror}{near}", where=file,
                        fix="name a file with one JSON object a line, or - for standard input") from None  # fmt: skip

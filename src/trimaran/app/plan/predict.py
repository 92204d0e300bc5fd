"""`trimaran predict`: predicts memory and speed of many given plans."""

import heapq
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from trimaran.app.recipe.options import argument, complete_lines
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import UserError, did_you_mean, open_regular_file, show_bytes, show_seconds
from trimaran.planner import MAX_LINE_BYTES, answer_line, example_text

FILE_HELP = "One JSON object per line: {id, model, cluster, plan, stack}. - is standard input."
Questions = Annotated[str | None, argument("FILE", FILE_HELP, complete_lines)]
Example = Annotated[bool, typer.Option("--example", help="Print a file to start from, and predict nothing.")]
AsLines = Annotated[bool, typer.Option("--json", help="Answer each line with one JSON object, in the same order.")]
MAX_ALL_ROWS = 40
MAX_BEST_ROWS = 20
MAX_ERRORS = 5


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
        raise UserError("A011.no-file", where="FILE")
    with _open(file) as stream:
        if not as_json:
            _show(stream)
            return
        # A pipe gets its answers one by one, a file in blocks.
        is_pipe, failed, count = not _size(stream), 0, 0
        for answer in _answers(stream):
            sys.stdout.write(json.dumps(answer) + "\n")
            failed, count = failed + ("error" in answer), count + 1
            if is_pipe:
                sys.stdout.flush()
        if failed:
            typer.echo(f'{failed} of {count} lines have an error: see their "error"', err=True)


def _show(stream: BinaryIO) -> None:
    """Print the answers as a table, their number, and the first errors."""
    from rich.progress import Progress
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console, plain_table

    console, size = open_console(), _size(stream)
    with Progress(console=console, transient=True, disable=not (size and console.is_terminal)) as bar:
        read = bar.wrap_file(stream, total=size, description="predicting") if size else stream
        tally, began = AnswerCount(), time.perf_counter()
        for answer in _answers(read):
            tally.add(answer)
        seconds = time.perf_counter() - began
    few = len(tally.first) <= MAX_ALL_ROWS
    rows = tally.first if few else [answer for *_, answer in sorted(tally.best, reverse=True)]
    table = plain_table()
    table.add_column("id", overflow="ellipsis", no_wrap=True, max_width=32)
    table.add_column("")
    for column in ("memory", "step", "tokens/s/GPU", "mfu"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for answer in rows:
        verdict = Text("fits", style=GREEN) if answer["fits"] else Text("no", style=RED)
        numbers = show_bytes(answer["device_bytes"]), show_seconds(answer["step_seconds"])
        speed = f"{answer['tokens_per_second_per_gpu']:,.0f}", f"{answer['mfu']:.0%}"
        table.add_row(Text(str(answer["id"])), verdict, *numbers, *speed, Text(answer.get("why", "")))
    if rows:
        console.print(table)
    summary = f"{tally.num_answers:,} lines in {show_seconds(seconds)}, {tally.num_fitting:,} fit"
    if not few:
        summary += f"; these are the {len(rows)} fastest per GPU, --json has all"
    console.print(Text(summary, style="dim"))
    if tally.num_errors:
        console.print(Text(f"{tally.num_errors:,} lines have errors:", style=RED))
    for answer in tally.errors:
        error = answer["error"]
        name = "" if answer["id"] is None else f", id {str(answer['id'])[:40]}"
        text = f"  {error['code']}: {error['what']} ({error['where']}{name}); {error['fix']}"
        console.print(Text(text), soft_wrap=True)


def _answers(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the answer to every line, blank ones too; the rest of a line that is too long is skipped."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(MAX_LINE_BYTES + 1)):
            pass
        yield answer_line(line, number)


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
        raise UserError("A011.plans-cannot-read", where=file, reason=error.strerror, near=near) from None


@dataclass(slots=True)
class AnswerCount:
    """The answers so far; of many answers only the shown ones are kept."""

    num_answers: int = 0
    num_fitting: int = 0
    num_errors: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)
    best: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        self.num_answers += 1
        if "error" in answer:
            self.num_errors += 1
            self.errors += [answer] if len(self.errors) < MAX_ERRORS else []
            return
        self.num_fitting += answer["fits"]
        self.first += [answer] if len(self.first) <= MAX_ALL_ROWS else []
        if answer["fits"]:
            push = heapq.heappush if len(self.best) < MAX_BEST_ROWS else heapq.heappushpop
            push(self.best, (answer["tokens_per_second_per_gpu"], -self.num_answers, answer))

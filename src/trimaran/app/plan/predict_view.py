"""Prints the answers of `predict`: all of them if they are few, else the fastest, and the errors."""

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import show_bytes, show_seconds

MAX_ALL_ROWS = 40
MAX_BEST_ROWS = 20
MAX_ERRORS = 5


@dataclass(slots=True)
class AnswerCount:
    """The answers so far; of many answers only the shown ones are kept."""

    num_answers: int = 0
    num_fitting: int = 0
    num_errors: int = 0
    seconds: float = 0.0
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


def count_answers(answers: Iterable[dict[str, Any]]) -> AnswerCount:
    """Return the answers and how long they took."""
    tally, began = AnswerCount(), time.perf_counter()
    for answer in answers:
        tally.add(answer)
    tally.seconds = time.perf_counter() - began
    return tally


def show_answers(tally: AnswerCount, console: Console) -> None:
    """Print the answers as a table, their number, and the first errors."""
    few = len(tally.first) <= MAX_ALL_ROWS
    rows = tally.first if few else [answer for *_, answer in sorted(tally.best, reverse=True)]
    if rows:
        console.print(_table(rows))
    summary = f"{tally.num_answers:,} lines in {show_seconds(tally.seconds)}, {tally.num_fitting:,} fit"
    if not few:
        summary += f"; these are the {len(rows)} fastest per GPU, --json has all"
    console.print(Text(summary, style="dim"))
    if tally.num_errors:
        console.print(Text(f"{tally.num_errors:,} lines have errors:", style=RED))
    for answer in tally.errors:
        error = answer["error"]
        text = f"  {error['code']}: {error['what']} ({error['where']}{_named(answer['id'])}); {error['fix']}"
        console.print(Text(text), soft_wrap=True)


def _named(name: Any) -> str:
    return "" if name is None else f", id {str(name)[:40]}"


def _table(answers: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("id", overflow="ellipsis", no_wrap=True, max_width=32)
    table.add_column("")
    for column in ("memory", "step", "tokens/s/GPU", "mfu"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for answer in answers:
        verdict = Text("fits", style=GREEN) if answer["fits"] else Text("no", style=RED)
        numbers = show_bytes(answer["device_bytes"]), show_seconds(answer["step_seconds"])
        speed = f"{answer['tokens_per_second_per_gpu']:,.0f}", f"{answer['mfu']:.0%}"
        table.add_row(Text(str(answer["id"])), verdict, *numbers, *speed, Text(answer.get("why", "")))
    return table

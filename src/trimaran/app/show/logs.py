"""The logs of the ranks: followed while they run, and their last lines afterwards."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trimaran.app.show.terminal import printable
from trimaran.core.regular_files import open_regular_file
from trimaran.runs import RunReader

MAX_TAIL_BYTES = 1 << 16
TRACEBACK = "Traceback (most recent call last):"
ATTEMPT = re.compile(r"-- start \d+ --")  # written by the fork server when it starts a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a rank printed, without control codes."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"[rank {self.rank}] {self.text}"


class LogFollower:
    """Yields the lines added to a rank's log since the last call; the first call starts at most 64 KiB before its end.

    Of a traceback it yields only the last line, which has the error: if one rank dies, all others print a traceback.
    """

    def __init__(self, reader: RunReader, rank: int) -> None:
        self._path, self._rank = reader.run.log(rank), rank
        self._reader = reader.follow(self._path, backlog=MAX_TAIL_BYTES)
        self._in_traceback = False

    def new(self) -> Iterator[LogLine]:
        for line in self._reader.lines(self._path):
            text = _visible_text(line)
            self._in_traceback = text.startswith(TRACEBACK) or (self._in_traceback and text[:1] in ("", " "))
            if text and not self._in_traceback and not ATTEMPT.fullmatch(text):
                yield LogLine(rank=self._rank, text=text)


def tail(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, without control codes; none if there is no such file."""
    if not path.exists():
        return []
    with open_regular_file(path) as file:
        file.seek(max(0, path.stat().st_size - MAX_TAIL_BYTES))
        lines = [text for line in file if (text := _visible_text(line))]
    return lines[-num_lines:]


def _visible_text(line: bytes) -> str:
    """Return what a terminal would show after `line`: a carriage return overwrites what came before it."""
    return printable(line.decode("utf-8", errors="replace").rstrip().rsplit("\r", 1)[-1])

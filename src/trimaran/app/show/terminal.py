"""Text that is safe to print, whatever a file contains: for a terminal, and of the logs of ranks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from trimaran.runs import RunReader

# Escape sequences (CSI, OSC and other strings), other control characters except tab and newline, and the characters
# that reorder the text around them.
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|\x9d)[^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
MAX_TAIL_BYTES = 1 << 16
TRACEBACK = "Traceback (most recent call last):"
ATTEMPT = re.compile(r"-- start \d+ --")  # written by the fork server when it starts a rank


def printable(text: str) -> str:
    """Return `text` without terminal control codes; newlines and tabs stay."""
    return _CONTROL.sub("", text)


class PrintableStream:
    """A text stream that removes control codes, which go to `raw`. No library can bypass it: it has no `buffer`."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that `stream` cleans, or `stream` itself."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def aligned(rows: Sequence[Sequence[str]], num_figures: int) -> list[str]:
    """Return rows as lines with aligned columns, the first ones to the right. No line is cut: paths can be copied."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if at < num_figures else str.ljust for at in range(len(widths))]
    return ["  ".join(side(text, width) for side, text, width in zip(sides, row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a rank printed, without control codes."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"[rank {self.rank}] {self.text}"


class LogFollower:
    """Yields new lines of a rank's log, from 64 KiB before its end; of a traceback only the last, the error."""

    def __init__(self, reader: "RunReader", rank: int) -> None:
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
    from trimaran.core.regular_files import open_regular_file

    if not path.exists():
        return []
    with open_regular_file(path) as file:
        file.seek(max(0, path.stat().st_size - MAX_TAIL_BYTES))
        lines = [text for line in file if (text := _visible_text(line))]
    return lines[-num_lines:]


def _visible_text(line: bytes) -> str:
    """Return what a terminal would show after `line`: a carriage return overwrites what came before it."""
    return printable(line.decode("utf-8", errors="replace").rstrip().rsplit("\r", 1)[-1])

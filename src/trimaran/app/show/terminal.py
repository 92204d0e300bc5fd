"""Text that is safe to print: whatever a file contains, it cannot steer the terminal that shows it."""

import re
import sys
from typing import Any, TextIO

# Escape sequences (CSI, OSC and other strings), other control characters except tab and newline, and the characters
# that reorder the text around them.
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-9;?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|\x9d)[^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Return `text` without terminal control codes; newlines and tabs stay."""
    return _CONTROL.sub("", text)


class PrintableStream:
    """A text stream that removes control codes from everything written to it.

    It has no `buffer`, so that no library can bypass it. Code that has to send control codes writes to `raw`.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.raw, name)


def clean_standard_streams() -> None:
    """Make `print`, logging, tracebacks and every library write to stdout and stderr without control codes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(stream))


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that `stream` cleans, or `stream` itself."""
    return stream.raw if isinstance(stream, PrintableStream) else stream

"""The rich console of every command: colours are ours, all other control codes are removed."""

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from trimaran.app.show.terminal import printable, raw_stream


class CleanConsole(Console):
    """Removes control codes from all text; only rich's own reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr. It reads no markup: text in square brackets is shown as it is."""
    file = raw_stream(sys.stderr if stderr else sys.stdout)
    return CleanConsole(file=file, highlight=False, markup=False, emoji=False)


def print_plain(console: Console, text: str) -> None:
    """Print `text` without markup and without wrapping."""
    console.print(Text(text), soft_wrap=True)

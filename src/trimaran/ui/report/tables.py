"""Parts that several sections are made of: tables, commands, notes, and dates."""

import time
from collections.abc import Iterable, Sequence

from trimaran.ui.report.markup import Content, Html, tag

EMPTY_PLOTS = '<div class="plots"></div>'


def section(title: str, *content: Html) -> Html:
    """Return a section with its heading; empty if there is nothing to show."""
    if not any(each not in ("", EMPTY_PLOTS) for each in content):
        return Html("")
    return tag("section", None, tag("h2", None, title), *content)


def plots(found: Iterable[Html]) -> Html:
    return tag("div", {"class": "plots"}, *found)


def note(text: str) -> Html:
    return tag("p", {"class": "quiet"}, text) if text else Html("")


def command(text: str) -> Html:
    """Return a command line; `page.js` adds a button that copies it."""
    return tag("pre", {"class": "command"}, text) if text else Html("")


def table(columns: Sequence[str], rows: Iterable[Sequence[Content]]) -> Html:
    """Return a table that scrolls horizontally if the page is too narrow."""
    head = tag("tr", None, *(tag("th", None, name) for name in columns))
    body = [tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in rows]
    return tag("div", {"class": "scroll"}, tag("table", None, tag("thead", None, head), tag("tbody", None, *body)))


def message(text: str) -> Html:
    """Return a message of a program: several lines as they are, one line as text."""
    if not text:
        return Html("")
    return tag("pre", None, text) if "\n" in text else tag("p", None, text)


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

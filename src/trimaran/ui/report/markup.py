"""Builds and writes HTML pages that fetch nothing. Text is escaped: nothing that a run wrote can become markup."""

import base64
import hashlib
import html
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from trimaran.app import printable
from trimaran.core import UserError, open_regular_file

VOID = {"meta"}  # HTML elements without an end tag
SHAPES = {"line", "rect", "circle", "polyline", "polygon"}


class Html(str):
    """Markup built by this package. Any other string is text."""

    __slots__ = ()


Content = str | Iterable[Html]
Attributes = Mapping[str, object]


def tag(name: str, attributes: Attributes | None = None, *children: Content) -> Html:
    """Return the element `name` with `children`; an attribute that is None or False is left out, True has no value."""
    given = [(key, value) for key, value in (attributes or {}).items() if value is not None and value is not False]
    pairs = "".join(f" {key}" if value is True else f' {key}="{_escaped(str(value))}"' for key, value in given)
    inside = "".join(map(text, children))
    if name in VOID:
        return Html(f"<{name}{pairs}>")
    return Html(f"<{name}{pairs}>{inside}</{name}>" if inside or name not in SHAPES else f"<{name}{pairs}/>")


def text(content: Content) -> Html:
    """Return `content` as markup: Html as it is, everything else escaped."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(_escaped(content))
    return Html("".join(map(text, content)))


def _escaped(content: str) -> str:
    return html.escape(printable(content), quote=True)


EMPTY_PLOTS = '<div class="plots"></div>'


def section(title: str, *content: Html) -> Html:
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
    head = tag("tr", None, *(tag("th", None, name) for name in columns))
    body = [tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in rows]
    return tag("div", {"class": "scroll"}, tag("table", None, tag("thead", None, head), tag("tbody", None, *body)))


def message(text: str) -> Html:
    if not text:
        return Html("")
    return tag("pre", None, text) if "\n" in text else tag("p", None, text)


def known(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def html_document(title: str, parts: Iterable[Html]) -> str:
    folder = files("trimaran.ui.report")
    style, script = (Html(folder.joinpath(name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    # Even if markup slipped in, a browser would run and fetch nothing but these two.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = tag(
        "head", None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", None, title),
        tag("style", None, style),
    )  # fmt: skip
    body = tag("body", None, tag("main", None, *parts), tag("script", None, script))
    return "<!doctype html>\n" + tag("html", {"lang": "en"}, head, body) + "\n"


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def write_page(path: Path, page: str, *, option: str) -> None:
    """Write the page to the file that `option` names; raise UserError if that is another kind of file, or fails."""
    beginning = page[: page.index("\n")]
    try:
        if path.exists() and path.stat().st_size:
            with open_regular_file(path, follow_links=True) as file:
                is_ours = file.read(len(beginning)) == beginning.encode()
        else:
            is_ours = True
        if not is_ours:
            raise UserError("A020.file-already-exists", where=str(path), option=option)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError("A020.page-cannot-written", where=str(path), reason=error.strerror, option=option) from None

"""HTML as values. Text is escaped where it becomes markup, so nothing that a run wrote is ever markup."""

import html
from collections.abc import Iterable, Mapping

from trimaran.app.views.logs import printable

VOID = {"meta"}  # has no end; in SVG every element has one
SHAPES = {"line", "rect", "polyline", "polygon"}


class Html(str):
    """Markup that this room has made. Any other string is text."""

    __slots__ = ()


Content = str | Iterable[Html]
Attributes = Mapping[str, object]


def tag(name: str, attributes: Attributes | None = None, *children: Content) -> Html:
    """Return the element `name` around `children`; an attribute that is None or False is left out, True is bare."""
    given = [(key, value) for key, value in (attributes or {}).items() if value is not None and value is not False]
    words = "".join(f" {key}" if value is True else f' {key}="{_escaped(str(value))}"' for key, value in given)
    inside = "".join(map(text, children))
    if name in VOID:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{inside}</{name}>" if inside or name not in SHAPES else f"<{name}{words}/>")


def text(content: Content) -> Html:
    """Return `content` as markup: what is markup already as it is, everything else escaped."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(_escaped(content))
    return Html("".join(map(text, content)))


def _escaped(words: str) -> str:
    return html.escape(printable(words), quote=True)

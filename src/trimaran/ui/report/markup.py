"""Builds HTML. All text is escaped, so that nothing a run wrote can become markup."""

import html
from collections.abc import Iterable, Mapping

from trimaran.app.show.terminal import printable

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

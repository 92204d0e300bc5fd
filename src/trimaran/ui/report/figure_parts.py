"""Parts that all figures of views have: a title, colours by name, and a legend."""

from collections.abc import Mapping, Sequence

from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.plot import swatch

KINDS = ("blue", "orange", "green", "purple", "sky", "red", "brown", "yellow", "grey")


def titled(title: str, *parts: Html, data: str | None = None) -> Html:
    """Return a figure with its title; `data` are the values that `page.js` shows under the pointer."""
    caption = tag("figcaption", None, tag("h3", None, title))
    return tag("figure", {"class": "view", "data-plot": data}, caption, *parts)


def color_kinds(names: Sequence[str], own: Mapping[str, int] | None = None) -> Mapping[str, str]:
    """Return a colour for each name: the one that it has in `own`, or one by its place."""
    numbers = {name: (own or {}).get(name, number) for number, name in enumerate(names)}
    return {name: KINDS[number % len(KINDS)] for name, number in numbers.items()}


def legend(kinds: Mapping[str, str], limits: Mapping[str, str] | None = None) -> Html:
    """Return what each colour means, and the dashed lines with their values; nothing if there is nothing to say."""
    items = [tag("li", None, swatch(kind), name) for name, kind in kinds.items() if name]
    items += [tag("li", None, _dashes(), f"{name} {value}".strip()) for name, value in (limits or {}).items()]
    return tag("ul", {"class": "legend"}, *items) if items else Html("")


def _dashes() -> Html:
    line = tag("line", {"class": "level", "x1": 0, "x2": 18, "y1": 5, "y2": 5})
    return tag("svg", {"class": "dashes", "viewBox": "0 0 18 10", "aria-hidden": "true"}, line)

"""Images of a run as inline SVG: they stretch to any width, and their words are HTML, readable on a phone.

An image shows its values under the pointer by a few lines of script (`page.js`); without it the caption has the values
that a person looks for.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimaran.app.report.axis_scale import SHOW, SIZE, Scale, round_scale, tick_words
from trimaran.app.report.downsample import Point
from trimaran.app.report.markup import Html, tag
from trimaran.core import show_seconds

DIGITS = 6  # of a value under the pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line; `kind` is its look in `page.css`. A band reaches from `points` up to `upper`.

    What has no name is explained elsewhere, and has no place in the legend or under the pointer.
    """

    name: str
    kind: str
    points: Sequence[Point]
    upper: Sequence[Point] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one place of the lower axis."""

    at: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What one image shows; `words` stand beside its title. `levels` are lines all the way, by name.

    The lower axis has steps or, if `since` is given, the time since then.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    since: float | None = None
    words: str = ""
    stacked: bool = False
    may_log: bool = False


def draw(plot: Plot) -> Html:
    """Return the image with its axes and caption; nothing where there are no points."""
    places = [at for curve in plot.curves for at, _ in curve.points]
    if not places:
        return Html("")
    across = Scale(low=min(places), high=max(places))
    up = _up(plot)
    shapes = [tag("line", {"class": "grid", "x1": 0, "x2": SIZE, "y1": y, "y2": y})
              for y in (SIZE * part // up.parts for part in range(up.parts + 1))]  # fmt: skip
    shapes += [_shape(curve, across, up) for curve in plot.curves]
    shapes += [_level(name, value, plot.unit, up) for name, value in plot.levels.items()]
    shapes += [_mark(mark, across) for mark in plot.marks if across.low <= mark.at <= across.high]
    pointer = tag("line", {"class": "pointer", "x1": 0, "x2": 0, "y1": 0, "y2": SIZE})
    image = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "role": "img",
                          "aria-label": f"{plot.title} {plot.words}"}, *shapes, pointer)  # fmt: skip
    ups = [tag("span", None, words) for words in reversed(tick_words(up, plot.unit))]
    acrosses = [tag("span", None, _where(plot, at)) for at in _ends(across)]
    frame = tag("div", {"class": "frame"}, tag("div", {"class": "ups", "aria-hidden": "true"}, *ups),
                tag("div", {"class": "picture"}, image, tag("output", None)),
                tag("div", {"class": "acrosses"}, *acrosses))  # fmt: skip
    caption = tag("figcaption", None, tag("b", None, plot.title), " ", *_legend(plot),
                  tag("span", {"class": "quiet"}, plot.words))  # fmt: skip
    kind = "wide" if plot.stacked else None
    return tag("figure", {"class": kind, "data-plot": _values(plot, across)}, caption, frame)


def shares_bar(parts: Mapping[str, float], kinds: Mapping[str, str], *, show: str = "seconds") -> Html:
    """Return one bar split like `parts`, and a legend with each part and its share."""
    total, passed, shapes, words = math.fsum(parts.values()) or 1.0, 0.0, [], []
    for name, part in parts.items():
        told = f"{name} {SHOW[show](part)} ({part / total:.1%})"
        x, width = round(passed / total * SIZE, 1), round(part / total * SIZE, 1)
        shapes.append(tag("rect", {"class": f"fill {kinds[name]}", "x": x, "width": width, "y": 0, "height": SIZE},
                          tag("title", None, told)))  # fmt: skip
        words.append(tag("li", None, swatch(kinds[name]), told))
        passed += part
    image = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "class": "bar", "role": "img",
                          "aria-label": ", ".join(parts)}, *shapes)  # fmt: skip
    return tag("div", None, image, tag("ul", {"class": "legend"}, *words))


def swatch(kind: str) -> Html:
    """Return a small square in the look of `kind`."""
    square = tag("rect", {"class": f"fill {kind}", "x": 0, "y": 0, "width": 10, "height": 10})
    return tag("svg", {"class": "swatch", "viewBox": "0 0 10 10", "aria-hidden": "true"}, square)


def _up(plot: Plot) -> Scale:
    values = [value for curve in plot.curves for _, value in (*curve.points, *curve.upper)]
    floor = [0.0] if plot.stacked else []
    return round_scale([*values, *plot.levels.values(), *floor], unit=plot.unit, may_log=plot.may_log)


def _ends(across: Scale) -> list[float]:
    return across.ticks(2) if across.high > across.low else [across.low]


def _shape(curve: Curve, across: Scale, up: Scale) -> Html:
    there = _places(curve.points, across, up)
    if curve.upper:
        back = _places(curve.upper, across, up)[::-1]
        return tag("polygon", {"class": f"fill {curve.kind}", "points": " ".join([*there, *back])})
    if len(there) == 1 or curve.kind == "dots":
        spots = [place.split(",") for place in there]
        # A line without a length, round at its ends, stays round when the image is stretched.
        return Html("".join(tag("line", {"class": f"dot {curve.kind}", "x1": x, "x2": x, "y1": y, "y2": y})
                            for x, y in spots))  # fmt: skip
    return tag("polyline", {"class": f"line {curve.kind}", "points": " ".join(there)})


def _places(points: Sequence[Point], across: Scale, up: Scale) -> list[str]:
    return [f"{across.place(x):.0f},{SIZE - up.place(y):.0f}" for x, y in points]


def _level(name: str, value: float, unit: str, up: Scale) -> Html:
    y = round(SIZE - up.place(value))
    told = tag("title", None, f"{name} {SHOW[unit](value)}")
    return tag("line", {"class": "level", "x1": 0, "x2": SIZE, "y1": y, "y2": y}, told)


def _mark(mark: Mark, across: Scale) -> Html:
    x = round(across.place(mark.at))
    told = tag("title", None, mark.words)
    return tag("line", {"class": f"mark {mark.kind}", "x1": x, "x2": x, "y1": 0, "y2": SIZE}, told)


def _legend(plot: Plot) -> list[Html]:
    named = [tag("span", {"class": "key"}, swatch(curve.kind), curve.name)
             for curve in plot.curves if curve.name]  # fmt: skip
    levels = [tag("span", {"class": "key"}, swatch("levels"), f"{name} {SHOW[plot.unit](value)}")
              for name, value in plot.levels.items()]  # fmt: skip
    kinds = {mark.kind: mark.words.split(":", 1)[0] for mark in reversed(plot.marks)}
    marks = [tag("span", {"class": "key"}, swatch(kind), words) for kind, words in kinds.items()]
    return [*(named if len(named) > 1 else []), *levels, *marks]


def _where(plot: Plot, at: float) -> str:
    return f"{at:.0f}" if plot.since is None else show_seconds(at - plot.since)


def _values(plot: Plot, across: Scale) -> str:
    """Return what the script reads: the values of each curve, and where the lower axis begins and ends."""
    series = [{"name": curve.name, "points": [[_short(x), _short(y)] for x, y in _shown(plot, number)]}
              for number, curve in enumerate(plot.curves) if curve.name]  # fmt: skip
    axis = {"low": across.low, "high": across.high, "since": plot.since}
    return json.dumps({"unit": plot.unit, "axis": axis, "series": series}, separators=(",", ":"))


def _shown(plot: Plot, number: int) -> list[Point]:
    """Return the values of a curve as a person means them: of a stacked part its height."""
    curve = plot.curves[number]
    if not plot.stacked:
        return list(curve.points)
    return [(x, top - y) for (x, y), (_, top) in zip(curve.points, curve.upper, strict=True)]


def _short(value: float) -> float:
    """Return `value` in as many digits as are shown, which keeps the page small."""
    if value == 0 or not math.isfinite(value):
        return 0
    short = round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    return int(short) if short == int(short) else short

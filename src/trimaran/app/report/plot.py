"""Plots as inline SVG: they stretch to any width, and their labels are HTML, readable on a phone.

`page.js` shows the values under the pointer; without it the caption has the most important values.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimaran.app.report.axis_scale import SHOW, SIZE, Scale, round_scale, tick_labels
from trimaran.app.report.downsample import Point
from trimaran.app.report.markup import Html, tag
from trimaran.core import show_seconds

POINTER_DIGITS = 6  # of a value shown under the pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line; `kind` is its CSS class in `page.css`. With `upper` it is a band from `points` up to `upper`.

    A curve without a name is neither in the legend nor shown under the pointer.
    """

    name: str
    kind: str
    points: Sequence[Point]
    upper: Sequence[Point] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at one position of the x axis."""

    at: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot; `caption` is the text beside its title. `levels` are horizontal lines, by name.

    The x axis has steps or, if `since` is given, the time since then.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    since: float | None = None
    caption: str = ""
    stacked: bool = False
    may_log: bool = False


def draw(plot: Plot) -> Html:
    """Return the plot with its axes and caption; empty if it has no points."""
    positions = [at for curve in plot.curves for at, _ in curve.points]
    if not positions:
        return Html("")
    x_scale = Scale(low=min(positions), high=max(positions))
    y_scale = _y_scale(plot)
    shapes = [tag("line", {"class": "grid", "x1": 0, "x2": SIZE, "y1": y, "y2": y})
              for y in (SIZE * part // y_scale.parts for part in range(y_scale.parts + 1))]  # fmt: skip
    shapes += [_shape(curve, x_scale, y_scale) for curve in plot.curves]
    shapes += [_level(name, value, plot.unit, y_scale) for name, value in plot.levels.items()]
    shapes += [_mark(mark, x_scale) for mark in plot.marks if x_scale.low <= mark.at <= x_scale.high]
    pointer = tag("line", {"class": "pointer", "x1": 0, "x2": 0, "y1": 0, "y2": SIZE})
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "role": "img",
                      "aria-label": f"{plot.title} {plot.caption}"}, *shapes, pointer)  # fmt: skip
    y_labels = [tag("span", None, label) for label in reversed(tick_labels(y_scale, plot.unit))]
    x_labels = [tag("span", None, _x_label(plot, at)) for at in _x_ticks(x_scale)]
    frame = tag("div", {"class": "frame"}, tag("div", {"class": "y-labels", "aria-hidden": "true"}, *y_labels),
                tag("div", {"class": "plot-area"}, svg, tag("output", None)),
                tag("div", {"class": "x-labels"}, *x_labels))  # fmt: skip
    caption = tag("figcaption", None, tag("b", None, plot.title), " ", *_legend(plot),
                  tag("span", {"class": "quiet"}, plot.caption))  # fmt: skip
    kind = "wide" if plot.stacked else None
    return tag("figure", {"class": kind, "data-plot": _values(plot, x_scale)}, caption, frame)


def stacked_bar(parts: Mapping[str, float], kinds: Mapping[str, str], *, show: str = "seconds") -> Html:
    """Return one bar split in proportion to `parts`, and a legend with each part and its percentage."""
    total, passed, shapes, items = math.fsum(parts.values()) or 1.0, 0.0, [], []
    for name, part in parts.items():
        label = f"{name} {SHOW[show](part)} ({part / total:.1%})"
        x, width = round(passed / total * SIZE, 1), round(part / total * SIZE, 1)
        shapes.append(tag("rect", {"class": f"fill {kinds[name]}", "x": x, "width": width, "y": 0, "height": SIZE},
                          tag("title", None, label)))  # fmt: skip
        items.append(tag("li", None, swatch(kinds[name]), label))
        passed += part
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "class": "bar", "role": "img",
                      "aria-label": ", ".join(parts)}, *shapes)  # fmt: skip
    return tag("div", None, svg, tag("ul", {"class": "legend"}, *items))


def swatch(kind: str) -> Html:
    """Return a small square in the colour of `kind`."""
    square = tag("rect", {"class": f"fill {kind}", "x": 0, "y": 0, "width": 10, "height": 10})
    return tag("svg", {"class": "swatch", "viewBox": "0 0 10 10", "aria-hidden": "true"}, square)


def _y_scale(plot: Plot) -> Scale:
    values = [value for curve in plot.curves for _, value in (*curve.points, *curve.upper)]
    floor = [0.0] if plot.stacked else []
    return round_scale([*values, *plot.levels.values(), *floor], unit=plot.unit, may_log=plot.may_log)


def _x_ticks(x_scale: Scale) -> list[float]:
    return x_scale.ticks(2) if x_scale.high > x_scale.low else [x_scale.low]


def _shape(curve: Curve, x_scale: Scale, y_scale: Scale) -> Html:
    line = _coordinates(curve.points, x_scale, y_scale)
    if curve.upper:
        upper = _coordinates(curve.upper, x_scale, y_scale)[::-1]
        return tag("polygon", {"class": f"fill {curve.kind}", "points": " ".join([*line, *upper])})
    if len(line) == 1 or curve.kind == "dots":
        dots = [point.split(",") for point in line]
        # A line of zero length with round caps stays round when the plot is stretched.
        return Html("".join(tag("line", {"class": f"dot {curve.kind}", "x1": x, "x2": x, "y1": y, "y2": y})
                            for x, y in dots))  # fmt: skip
    return tag("polyline", {"class": f"line {curve.kind}", "points": " ".join(line)})


def _coordinates(points: Sequence[Point], x_scale: Scale, y_scale: Scale) -> list[str]:
    return [f"{x_scale.position(x):.0f},{SIZE - y_scale.position(y):.0f}" for x, y in points]


def _level(name: str, value: float, unit: str, y_scale: Scale) -> Html:
    y = round(SIZE - y_scale.position(value))
    title = tag("title", None, f"{name} {SHOW[unit](value)}")
    return tag("line", {"class": "level", "x1": 0, "x2": SIZE, "y1": y, "y2": y}, title)


def _mark(mark: Mark, x_scale: Scale) -> Html:
    x = round(x_scale.position(mark.at))
    title = tag("title", None, mark.label)
    return tag("line", {"class": f"mark {mark.kind}", "x1": x, "x2": x, "y1": 0, "y2": SIZE}, title)


def _legend(plot: Plot) -> list[Html]:
    named = [tag("span", {"class": "key"}, swatch(curve.kind), curve.name)
             for curve in plot.curves if curve.name]  # fmt: skip
    levels = [tag("span", {"class": "key"}, swatch("levels"), f"{name} {SHOW[plot.unit](value)}")
              for name, value in plot.levels.items()]  # fmt: skip
    kinds = {mark.kind: mark.label.split(":", 1)[0] for mark in reversed(plot.marks)}
    marks = [tag("span", {"class": "key"}, swatch(kind), label) for kind, label in kinds.items()]
    return [*(named if len(named) > 1 else []), *levels, *marks]


def _x_label(plot: Plot, at: float) -> str:
    return f"{at:.0f}" if plot.since is None else show_seconds(at - plot.since)


def _values(plot: Plot, x_scale: Scale) -> str:
    """Return the JSON for `page.js`: the values of each curve, and both ends of the x axis."""
    series = [{"name": curve.name, "points": [[_short(x), _short(y)] for x, y in _shown(plot, index)]}
              for index, curve in enumerate(plot.curves) if curve.name]  # fmt: skip
    axis = {"low": x_scale.low, "high": x_scale.high, "since": plot.since}
    return json.dumps({"unit": plot.unit, "axis": axis, "series": series}, separators=(",", ":"))


def _shown(plot: Plot, index: int) -> list[Point]:
    """Return the values of a curve to show; of a stacked part its own height."""
    curve = plot.curves[index]
    if not plot.stacked:
        return list(curve.points)
    return [(x, top - y) for (x, y), (_, top) in zip(curve.points, curve.upper, strict=True)]


def _short(value: float) -> float:
    """Return `value` rounded to the digits that are shown, which keeps the page small."""
    if value == 0 or not math.isfinite(value):
        return 0
    short = round(value, POINTER_DIGITS - 1 - math.floor(math.log10(abs(value))))
    return int(short) if short == int(short) else short

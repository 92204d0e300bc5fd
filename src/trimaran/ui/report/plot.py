"""Plots as inline SVG: they stretch to any width, and no text is stretched with them.

Every text has its own place: title, legend, axis labels, names beside the ends of the lines, values under the pointer
(`page.js`), and the most important values below. No text is drawn over another at any size.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.ui.report.axis_scale import SHOW, SIZE, Scale, round_scale, tick_labels
from trimaran.ui.report.downsample import Point
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.words import say

POINTER_DIGITS = 6  # of a value shown under the pointer
LABEL_GAP = 0.13  # between two end labels: 17 pixels of the lowest plot, which has 140
MAX_NARROW_LABEL, MAX_LABEL = 9, 15  # characters that fit into the narrow and the broad column of end labels


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
    """One plot. `stats` are names and values below it. `levels` are horizontal lines, by name.

    The x axis has steps or, if `since` is given, the time since then; with `by_size`, binary logarithms of bytes; with
    `counted`, a number of these, such as tokens. A `wide` plot takes a whole row.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    since: float | None = None
    stats: Sequence[tuple[str, str]] = ()
    stacked: bool = False
    may_log: bool = False
    wide: bool = False
    by_size: bool = False
    counted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLabel:
    """A name beside the right end of a line: its text, its colour and its height, from 0 at the top to 1."""

    text: str
    kind: str
    top: float


def draw(plot: Plot, *, may_zoom: bool = False) -> Html:
    """Return the plot with its axes and caption; empty if it has no points. `may_zoom`: dragging selects a range."""
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
    chosen = [tag("rect", {"class": "selection", "x": 0, "width": 0, "y": 0, "height": SIZE})] if may_zoom else []
    words = ", ".join(f"{name} {value}" for name, value in plot.stats)
    shapes += [pointer, *chosen]
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "role": "img",
                      "aria-label": f"{plot.title}: {words}" if words else plot.title}, *shapes)  # fmt: skip
    y_labels = [tag("span", None, label) for label in reversed(tick_labels(y_scale, plot.unit))]
    x_labels = [tag("span", None, label) for label in _x_labels(plot, x_scale)]
    labels = end_labels(plot, y_scale)
    frame = tag("div", {"class": "frame"}, tag("div", {"class": "y-labels", "aria-hidden": "true"}, *y_labels),
                tag("div", {"class": "plot-area"}, svg), _draw_end_labels(labels) if labels else "",
                tag("div", {"class": "x-labels"}, *x_labels))  # fmt: skip
    legend = _legend(plot)
    stats = [tag("li", None, tag("span", None, name), value) for name, value in plot.stats]
    parts = [
        tag("figcaption", None, tag("h3", None, plot.title)),
        tag("ul", {"class": "legend"}, *legend) if legend else Html(""),
        frame,
        tag("output", None),
        tag("ul", {"class": "stats"}, *stats) if stats else Html(""),
    ]
    kind = "wide" if plot.stacked or plot.wide else None
    return tag("figure", {"class": kind, "data-plot": _values(plot, x_scale), "data-zoom": may_zoom}, *parts)


def end_labels(plot: Plot, y_scale: Scale) -> list[EndLabel]:
    """Return the names and last values of the lines and levels, moved apart so that none covers another.

    The names of stacked parts and of bands are in the legend. A single line has no name, as the title is its name.
    Where space is scarce, several lines have no values: those are below the plot.
    """
    if plot.stacked:
        return []
    lines = [(curve.name, curve.kind, curve.points[-1][1]) for curve in plot.curves
             if curve.name and curve.points and not curve.upper]  # fmt: skip
    lines += [(name, "levels", value) for name, value in plot.levels.items()]
    has_names, has_values = len(lines) > 1, len(lines) == 1 or plot.wide
    wanted = sorted((1 - y_scale.position(value) / SIZE, name, kind, value) for name, kind, value in lines)
    tops = spread_apart([top for top, *_ in wanted], gap=LABEL_GAP)
    return [
        EndLabel(text=" ".join([name] * has_names + [SHOW[plot.unit](value)] * has_values), kind=kind, top=top)
        for top, (_, name, kind, value) in zip(tops, wanted, strict=True)
    ]


def spread_apart(tops: Sequence[float], *, gap: float) -> list[float]:
    """Return sorted positions from 0 to 1 that are near `tops`, which are sorted, and at least `gap` apart."""
    gap = min(gap, 1 / max(1, len(tops) - 1))
    moved: list[float] = []
    for top in tops:
        moved.append(max(top, moved[-1] + gap) if moved else top)
    limit = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def _draw_end_labels(labels: Sequence[EndLabel]) -> Html:
    """Return the labels as SVG text in a column of its own: positions in percent, letters in pixels."""
    shapes = []
    for each in labels:
        y = f"{100 * each.top:.1f}%"
        shapes.append(tag("line", {"class": f"dot {each.kind}", "x1": 5, "x2": 5, "y1": y, "y2": y}))
        shapes.append(tag("text", {"x": 13, "y": y, "dy": "0.35em"}, each.text[:MAX_LABEL]))
    width = "ends broad" if max(len(each.text) for each in labels) > MAX_NARROW_LABEL else "ends"
    return tag("svg", {"class": width, "aria-hidden": "true"}, *shapes)


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
    across, upwards = x_scale.positions([x for x, _ in points]), y_scale.positions([y for _, y in points])
    return [f"{x:.0f},{SIZE - y:.0f}" for x, y in zip(across, upwards, strict=True)]


def _level(name: str, value: float, unit: str, y_scale: Scale) -> Html:
    y = round(SIZE - y_scale.position(value))
    title = tag("title", None, f"{name} {SHOW[unit](value)}")
    return tag("line", {"class": "level", "x1": 0, "x2": SIZE, "y1": y, "y2": y}, title)


def _mark(mark: Mark, x_scale: Scale) -> Html:
    x = round(x_scale.position(mark.at))
    title = tag("title", None, mark.label)
    return tag("line", {"class": f"mark {mark.kind}", "x1": x, "x2": x, "y1": 0, "y2": SIZE}, title)


def _legend(plot: Plot) -> list[Html]:
    """Return the parts of a stacked plot, the bands, and the kinds of events. Lines have names at their ends."""
    named = [(curve.kind, curve.name) for curve in plot.curves if curve.name and (plot.stacked or curve.upper)]
    kinds = {mark.kind: mark.label.split(":", 1)[0] for mark in reversed(plot.marks)}
    return [tag("li", None, swatch(kind), name) for kind, name in [*named, *kinds.items()]]


def _x_labels(plot: Plot, x_scale: Scale) -> list[str]:
    """Return the labels of the x axis: the first says what they count."""
    ticks = _x_ticks(x_scale)
    if plot.by_size:
        return [show_bytes(2**at) for at in ticks]
    if plot.since is not None:
        return [show_seconds(at - plot.since) for at in ticks]
    if plot.counted:
        return [f"{show_count(ticks[0])} {plot.counted}", *(show_count(at) for at in ticks[1:])]
    return [say("step {step}", step=f"{ticks[0]:,.0f}"), *(f"{at:,.0f}" for at in ticks[1:])]


def _values(plot: Plot, x_scale: Scale) -> str:
    """Return the JSON for `page.js`: the values of each curve, and both ends of the x axis."""
    series = [{"name": curve.name, "points": [[_short(x), _short(y)] for x, y in _shown(plot, index)]}
              for index, curve in enumerate(plot.curves) if curve.name]  # fmt: skip
    axis = {"low": x_scale.low, "high": x_scale.high, "since": plot.since} | ({"by_size": True} if plot.by_size else {})
    axis |= {"counted": plot.counted} if plot.counted else {}
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
    short = float(f"{value:.{POINTER_DIGITS}g}")
    return int(short) if short == int(short) else short

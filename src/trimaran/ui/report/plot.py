"""Plots as inline SVG: they stretch to any width, and no text is stretched with them.

Every text of a plot has its own place: title, legend, axis labels, names beside the ends of the lines, values under the
pointer (`page.js`), and the most important values below. No text is drawn over another at any size. Lines and scatter
plots of views have named axes and a legend instead.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.ui.language import say
from trimaran.ui.report.curves import Point
from trimaran.ui.report.figure_axis import (
    SHOW,
    SIZE,
    FigureAxis,
    axis_for,
    color_kinds,
    curve_shape,
    even_axis,
    even_labels,
    grid_lines,
    legend,
    level_line,
    plot_area,
    stretched,
    titled,
    x_axis,
    y_axis,
)
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Lines, Scatter, Unit, show_value

POINTER_DIGITS = 6  # of a value shown under the pointer
LABEL_GAP = 0.13  # between two end labels: 17 pixels of the lowest plot, which has 140
MAX_NARROW_LABEL, MAX_LABEL = 9, 15  # characters that fit into the narrow and the broad column of end labels
MAX_LIMIT_FACTOR = 3.0  # times the largest value; a line further away would press the points together
POINTER = tag("line", {"class": "pointer", "x1": 0, "x2": 0, "y1": 0, "y2": SIZE})
SCRIPT_UNITS: Mapping[Unit, str] = {"bytes/second": "bytes/s", "fraction": "share", "count": "number", "": "number",
                                    "currency": "number"}  # fmt: skip


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
    across = FigureAxis(min(positions), max(positions))
    values = [value for curve in plot.curves for _, value in (*curve.points, *curve.upper)]
    floor = [0.0] if plot.stacked else []
    upwards = even_axis([*values, *plot.levels.values(), *floor], plot.unit, may_log=plot.may_log)

    shapes = grid_lines((), map(upwards.place, upwards.even_values()))
    for curve in plot.curves:
        lower, upper = ([(across.place(x), upwards.place(y)) for x, y in points]
                        for points in (curve.points, curve.upper))  # fmt: skip
        if upper:
            corners = " ".join(f"{SIZE * x:.0f},{SIZE * (1 - y):.0f}" for x, y in [*lower, *reversed(upper)])
            shapes.append(tag("polygon", {"class": f"fill {curve.kind}", "points": corners}))
        else:
            shapes.append(curve_shape(lower, curve.kind, is_dots=curve.kind == "dots"))
    for name, value in plot.levels.items():
        shapes.append(level_line(upwards.place(value), f"{name} {SHOW[plot.unit](value)}"))
    for mark in plot.marks:
        if across.low <= mark.at <= across.high:
            x = round(SIZE * across.place(mark.at))
            shapes.append(tag("line", {"class": f"mark {mark.kind}", "x1": x, "x2": x, "y1": 0, "y2": SIZE},
                              tag("title", None, mark.label)))  # fmt: skip
    shapes.append(POINTER)
    if may_zoom:
        shapes.append(tag("rect", {"class": "selection", "x": 0, "width": 0, "y": 0, "height": SIZE}))

    words = ", ".join(f"{name} {value}" for name, value in plot.stats)
    y_labels = [tag("span", None, label) for label in reversed(even_labels(upwards, plot.unit))]
    x_labels = [tag("span", None, label) for label in _x_labels(plot, across)]
    labels = end_labels(plot, upwards)
    frame = tag("div", {"class": "frame"}, tag("div", {"class": "y-labels", "aria-hidden": "true"}, *y_labels),
                plot_area(shapes, f"{plot.title}: {words}" if words else plot.title),
                _draw_end_labels(labels) if labels else "", tag("div", {"class": "x-labels"}, *x_labels))  # fmt: skip
    # Lines have names at their ends; the parts of a stacked plot, the bands and the kinds of events are in the legend.
    named = [(curve.name, curve.kind) for curve in plot.curves if plot.stacked or curve.upper]
    events = {mark.kind: mark.label.split(":", 1)[0] for mark in reversed(plot.marks)}
    stats = [tag("li", None, tag("span", None, name), value) for name, value in plot.stats]
    return tag(
        "figure",
        {
            "class": "wide" if plot.stacked or plot.wide else None,
            "data-plot": _values(plot, across),
            "data-zoom": may_zoom,
        },
        tag("figcaption", None, tag("h3", None, plot.title)),
        legend([*named, *((name, kind) for kind, name in events.items())]),
        frame,
        tag("output", None),
        tag("ul", {"class": "stats"}, *stats) if stats else Html(""),
    )


def end_labels(plot: Plot, upwards: FigureAxis) -> list[EndLabel]:
    """Return the names and last values of the lines and levels, moved apart so that none covers another.

    A single line has no name, as the title is its name. Where space is scarce, several lines have no values: those are
    below the plot.
    """
    if plot.stacked:
        return []
    lines = [(curve.name, curve.kind, curve.points[-1][1]) for curve in plot.curves
             if curve.name and curve.points and not curve.upper]  # fmt: skip
    lines += [(name, "levels", value) for name, value in plot.levels.items()]
    has_names, has_values = len(lines) > 1, len(lines) == 1 or plot.wide
    wanted = sorted((1 - upwards.place(value), name, kind, value) for name, kind, value in lines)
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


def _x_labels(plot: Plot, across: FigureAxis) -> list[str]:
    """Return the labels of the x axis: the first says what they count."""
    ticks = across.even_values(2) if across.high > across.low else [across.low]
    if plot.by_size:
        return [show_bytes(2**at) for at in ticks]
    if plot.since is not None:
        return [show_seconds(at - plot.since) for at in ticks]
    if plot.counted:
        return [f"{show_count(ticks[0])} {plot.counted}", *(show_count(at) for at in ticks[1:])]
    return [say("step {step}", step=f"{ticks[0]:,.0f}"), *(f"{at:,.0f}" for at in ticks[1:])]


def _values(plot: Plot, across: FigureAxis) -> str:
    """Return the JSON for `page.js`: the values of each curve, of a stacked part its own height; and the x axis."""
    series: list[tuple[str, object]] = []
    for curve in plot.curves:
        points = list(curve.points)
        if plot.stacked:
            points = [(x, top - y) for (x, y), (_, top) in zip(curve.points, curve.upper, strict=True)]
        series.append((curve.name, [[_short(x), _short(y)] for x, y in points]))
    axis: dict[str, Any] = {"since": plot.since} | ({"by_size": True} if plot.by_size else {})
    axis |= {"counted": plot.counted} if plot.counted else {}
    return _script_values(plot.unit, axis, across, series)


def _script_values(unit: str, axis: Mapping[str, Any], across: FigureAxis, series: Sequence[tuple[str, object]]) -> str:
    """Return the JSON for `page.js`: values by the name of their line, and both ends of the x axis as it is drawn."""
    ends = {"low": across.position(across.low), "high": across.position(across.high)}
    named = [{"name": name, "points": points} for name, points in series if name]
    return json.dumps({"unit": unit, "axis": ends | dict(axis), "series": named}, separators=(",", ":"))


def _short(value: float) -> float:
    """Return `value` rounded to the digits that are shown, which keeps the page small."""
    if value == 0 or not math.isfinite(value):
        return 0
    short = float(f"{value:.{POINTER_DIGITS}g}")
    return int(short) if short == int(short) else short


def stacked_bar(parts: Mapping[str, float], kinds: Mapping[str, str], *, show: str = "seconds") -> Html:
    """Return one bar split in proportion to `parts`, and a legend with each part and its percentage."""
    total, passed, shapes, items = math.fsum(parts.values()) or 1.0, 0.0, [], []
    for name, part in parts.items():
        label = f"{name} {SHOW[show](part)} ({part / total:.1%})"
        x, width = round(passed / total * SIZE, 1), round(part / total * SIZE, 1)
        shapes.append(tag("rect", {"class": f"fill {kinds[name]}", "x": x, "width": width, "y": 0, "height": SIZE},
                          tag("title", None, label)))  # fmt: skip
        items.append((label, kinds[name]))
        passed += part
    return tag("div", None, stretched(shapes, ", ".join(parts), kind="bar"), legend(items))


def draw_lines(figure: Lines) -> Html:
    """Return lines over both axes. Values under the pointer are shown by `page.js`."""
    kinds = color_kinds([series.name for series in figure.series])
    across = FigureAxis(min(figure.x), max(figure.x), figure.x_unit)
    if figure.log_x:
        across = axis_for(figure.x, figure.x_unit, log=True, from_zero=False)
    values = [each for series in figure.series for each in series.values if each is not None]
    upwards = axis_for([*values, *figure.limits.values()], figure.unit, log=figure.log_y)
    shapes = [level_line(upwards.place(limit), name) for name, limit in figure.limits.items()]
    series: list[tuple[str, object]] = []
    for each in figure.series:
        points = [(x, value) for x, value in zip(figure.x, each.values, strict=True) if value is not None]
        places = [(across.place(x), upwards.place(value)) for x, value in points]
        shapes.append(curve_shape(places, kinds[each.name], is_dots=each.name in figure.dots))
        series.append((each.name, [[round(across.position(x), 6), value] for x, value in points]))
    limits = {name: show_value(limit, figure.unit) for name, limit in figure.limits.items()}
    key = legend(kinds.items() if len(kinds) > 1 or limits else (), limits)
    unit = SCRIPT_UNITS.get(figure.x_unit, figure.x_unit)
    axis = {"since": None, "x": {"name": figure.x_name, "unit": unit, "log": across.log}}
    data = _script_values(SCRIPT_UNITS.get(figure.unit, figure.unit), axis, across, series)
    chart = _chart(figure.title, [*shapes, POINTER], across, upwards, x_name=figure.x_name, y_name="")
    return titled(figure.title, key, chart, tag("output", None), data=data)


def draw_scatter(figure: Scatter) -> Html:
    """Return points in two dimensions; what each is, is shown when the pointer is on it."""
    names = list(dict.fromkeys(point.kind for point in figure.points))
    kinds = color_kinds(names, figure.colors)
    most = max((point.x for point in figure.points), default=0.0)
    limit = [figure.x_limit] if figure.x_limit and figure.x_limit <= MAX_LIMIT_FACTOR * most else []
    across = axis_for([*(point.x for point in figure.points), *limit], figure.x_unit, from_zero=False)
    upwards = axis_for([point.y for point in figure.points], figure.y_unit, from_zero=False)
    shapes = [level_line(across.place(each), is_upright=True) for each in limit]
    for point in sorted(figure.points, key=lambda point: point.kind in names[:1]):
        values = f"{show_value(point.x, figure.x_unit)}, {show_value(point.y, figure.y_unit)}"
        x, y = round(SIZE * across.place(point.x)), round(SIZE * (1 - upwards.place(point.y)))
        label = tag("title", None, f"{point.name}: {values}. {point.note}".strip())
        shapes.append(
            tag("line", {"class": f"dot point {kinds[point.kind]}", "x1": x, "x2": x, "y1": y, "y2": y}, label)
        )
    limits = {figure.limit_name: show_value(figure.x_limit, figure.x_unit)} if limit else {}
    chart = _chart(figure.title, shapes, across, upwards, x_name=figure.x_name, y_name=figure.y_name)
    return titled(figure.title, legend(kinds.items(), limits), chart)


def _chart(
    title: str, shapes: Sequence[Html], across: FigureAxis, upwards: FigureAxis, *, x_name: str, y_name: str
) -> Html:
    """Return shapes over a grid, between axes with round ticks and names."""
    grid = grid_lines((tick.at for tick in across.ticks()), (tick.at for tick in upwards.ticks()))
    name = [tag("p", {"class": "axis-name"}, f"↑ {y_name}")] if y_name else []
    return tag("div", None, *name, tag("div", {"class": "chart"}, y_axis(upwards.ticks()),
               plot_area([*grid, *shapes], title), x_axis(across.ticks())),
               tag("p", {"class": "axis-name across"}, f"{x_name} →"))  # fmt: skip

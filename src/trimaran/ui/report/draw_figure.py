"""Draws figures for pages: tables, and inline SVG that stretches to any width while no text is stretched with it
(decision 0094).

Every text has its own place, so none is drawn over another at any size: title, legend, labels of the axes, names beside
the ends of lines, values under the pointer (`page.js`), and the most important values below.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trimaran.core import show_count, show_seconds
from trimaran.ui.language import say
from trimaran.ui.report.figure_axis import (
    KINDS,
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
    percent,
    stretched,
    titled,
    upright_line,
    x_axis,
)
from trimaran.ui.report.markup import Html, table, tag
from trimaran.ui.viz.figures import (
    Bars,
    Figure,
    FileText,
    GraphArrow,
    Lines,
    Matrix,
    NodeGraph,
    Scatter,
    Span,
    Table,
    Timeline,
    show_value,
)

POINTER_DIGITS = 6  # of a value shown under the pointer
LABEL_GAP = 0.13  # between two end labels: 17 pixels of the lowest plot, which has 140
MAX_NARROW_LABEL, MAX_LABEL = 9, 15  # characters that fit into the narrow and the broad column of end labels
MAX_LIMIT_FACTOR = 3.0  # times the largest value; a line further away would press the points together
SCRIPT_UNITS = {"bytes/second": "bytes/s", "fraction": "share", "count": "number", "": "number", "currency": "number"}
ROW_HEIGHT = 26
MAX_ROW_TICKS = 4  # beside the names of rows and their totals an axis is narrow on a phone
MAX_LABELLED = 700  # spans of a timeline that have their labels inside
CHARACTER_PERCENT = 0.85  # of the width of a timeline that one character of a label needs
MIN_PERCENT = 0.12  # of the width, so that a short span can be seen
SHADES = 10
MAX_UNBROKEN = 14  # characters of a cell that stay on one line
SQUARE, WIDE = (420, 420), (900, 250)
RADIUS = 22  # of a round node
BOX = (56, 20)  # half the width and height of a node with a name of several letters
HEAD = 9  # length of an arrow's head
BESIDE = 9  # distance of two arrows between the same nodes


class EndLabel(NamedTuple):
    """A name beside the right end of a line: its text, its colour and its height, from 0 at the top to 1."""

    text: str
    kind: str
    top: float


def draw_figure(figure: Figure) -> Html:
    match figure:
        case Table():
            rows = [[cell.replace(" ", "\u00a0") if len(cell) <= MAX_UNBROKEN else cell for cell in row]
                    for row in figure.rows]  # fmt: skip
            return titled(figure.title, table(figure.columns, rows))
        case FileText():
            kind = "file" if "\n" in figure.content.strip() else None
            return titled(figure.title, tag("div", {"class": kind}, tag("pre", {"class": "command"}, figure.content)))
    return DRAWN[type(figure)](figure)


def draw_lines(figure: Lines, *, may_zoom: bool = False) -> Html:
    """Return lines over both axes; empty without points. `may_zoom`: dragging selects a range.

    The lines of a view have named axes and a legend; those of a report, over its steps, names and values at their ends.
    """
    usual = color_kinds([each.name for each in figure.series])
    kinds = {each.name: each.color or usual[each.name] for each in figure.series}
    drawn = [(each, [(x, y) for x, y in zip(each.at or figure.x, each.values, strict=True) if y is not None])
             for each in figure.series]  # fmt: skip
    positions = figure.x or [x for _, points in drawn for x, _ in points]
    if not positions:
        return Html("")
    values = [y for each, points in drawn for y in (*(y for _, y in points), *each.upper)] + [*figure.limits.values()]
    across = FigureAxis(min(positions), max(positions), figure.x_unit)
    if figure.x_name:
        across = axis_for(positions, figure.x_unit, log=True, from_zero=False) if figure.log_x else across
        upwards = axis_for(values, figure.unit, log=figure.log_y)
    else:
        upwards = even_axis([*values, *([0.0] if figure.stacked else [])], figure.unit, may_log=figure.log_y)

    shapes: list[Html] = [] if figure.x_name else grid_lines((), map(upwards.place, upwards.even_values()))
    series = []
    for each, points in drawn:
        places, color = [(across.place(x), upwards.place(y)) for x, y in points], each.color or usual[each.name]
        if each.upper:
            top = [(x, upwards.place(y)) for (x, _), y in zip(places, each.upper, strict=True)]
            corners = " ".join(f"{SIZE * x:.0f},{SIZE * (1 - y):.0f}" for x, y in [*places, *reversed(top)])
            shapes.append(tag("polygon", {"class": f"fill {color}", "points": corners}))
        else:
            shapes.append(curve_shape(places, color, is_dots=color == "dots" or each.name in figure.dots))
        if figure.stacked:  # what is shown of a part is its own height
            points = [(x, top - y) for (x, y), top in zip(points, each.upper, strict=True)]
        if each.name:
            shown = [[_short(across.position(x)), _short(y)] for x, y in points]
            series.append({"name": each.name, "points": shown})
    show = SHOW[figure.unit] if not figure.x_name else lambda value: show_value(value, figure.unit)
    limits = {name: show(value) for name, value in figure.limits.items()}
    for name, y in ((name, round(SIZE * (1 - upwards.place(value)))) for name, value in figure.limits.items()):
        title = tag("title", None, f"{name} {limits[name]}")
        shapes.append(tag("line", {"class": "level", "x1": 0, "x2": SIZE, "y1": y, "y2": y}, title))
    shapes += [upright_line(across.place(mark.at), f"mark {mark.kind}", mark.label)
               for mark in figure.marks if across.low <= mark.at <= across.high]  # fmt: skip
    shapes.append(tag("line", {"class": "pointer", "x1": 0, "x2": 0, "y1": 0, "y2": SIZE}))
    if may_zoom:
        shapes.append(tag("rect", {"class": "selection", "x": 0, "width": 0, "y": 0, "height": SIZE}))

    axis: dict[str, Any] = {"low": across.position(across.low), "high": across.position(across.high), "since": None}
    if figure.x_name:
        axis["x"] = {"name": figure.x_name, "unit": SCRIPT_UNITS.get(figure.x_unit, figure.x_unit), "log": across.log}
    elif figure.x_unit == "seconds":
        axis["since"] = 0
    elif figure.x_unit == "tokens":
        axis["counted"] = say("tokens")
    unit = SCRIPT_UNITS.get(figure.unit, figure.unit) if figure.x_name else figure.unit
    data = json.dumps({"unit": unit, "axis": axis, "series": series}, separators=(",", ":"))
    if figure.x_name:
        key = legend(kinds.items() if len(kinds) > 1 or limits else (), limits)
        chart = _chart(figure.title, shapes, across, upwards, x_name=figure.x_name, y_name="")
        return titled(figure.title, key, chart, tag("output", None), data=data)
    return _draw_frame(figure, shapes, across, upwards, {"data-plot": data, "data-zoom": may_zoom})


def _draw_frame(
    figure: Lines, shapes: Sequence[Html], across: FigureAxis, upwards: FigureAxis, about: Mapping[str, object]
) -> Html:
    """Return the lines of a report between the labels of their axes and of their ends."""
    words = ", ".join(f"{name} {value}" for name, value in figure.stats)
    label = f"{figure.title}: {words}" if words else figure.title
    y_labels = [tag("span", None, label) for label in reversed(even_labels(upwards, figure.unit))]
    ticks, tokens = across.even_values(2) if across.high > across.low else [across.low], say("tokens")
    if across.unit == "seconds":
        names = [show_seconds(at) for at in ticks]
    elif across.unit == "tokens":
        names = [f"{show_count(ticks[0])} {tokens}", *(show_count(at) for at in ticks[1:])]
    else:
        names = [say("step {step}", step=f"{ticks[0]:,.0f}"), *(f"{at:,.0f}" for at in ticks[1:])]
    x_labels, ends = [tag("span", None, name) for name in names], Html("")
    if labels := end_labels(figure, upwards):
        dots = []
        for each in labels:
            y = f"{100 * each.top:.1f}%"
            dots.append(tag("line", {"class": f"dot {each.kind}", "x1": 5, "x2": 5, "y1": y, "y2": y}))
            dots.append(tag("text", {"x": 13, "y": y, "dy": "0.35em"}, each.text[:MAX_LABEL]))
        is_broad = max(len(each.text) for each in labels) > MAX_NARROW_LABEL
        ends = tag("svg", {"class": "ends broad" if is_broad else "ends", "aria-hidden": "true"}, *dots)
    frame = tag("div", {"class": "frame"}, tag("div", {"class": "y-labels", "aria-hidden": "true"}, *y_labels),
                tag("div", {"class": "plot-area"}, stretched(shapes, label)),
                ends, tag("div", {"class": "x-labels"}, *x_labels))  # fmt: skip
    # Lines have names at their ends; the parts of a stacked plot, the bands and the kinds of events are in the legend.
    named = [(each.name, each.color) for each in figure.series if each.upper]
    events = {mark.kind: mark.label.split(":", 1)[0] for mark in reversed(figure.marks)}
    stats = [tag("li", None, tag("span", None, name), value) for name, value in figure.stats]
    kind = {"class": "wide" if figure.stacked or figure.broad else None}
    return tag("figure", {**kind, **about}, tag("figcaption", None, tag("h3", None, figure.title)),
               legend([*named, *((name, kind) for kind, name in events.items())]), frame, tag("output", None),
               tag("ul", {"class": "stats"}, *stats) if stats else "")  # fmt: skip


def end_labels(figure: Lines, upwards: FigureAxis) -> list[EndLabel]:
    """Return the names and last values of the lines and limits, moved apart so that none covers another.

    A single line has no name, as the title is its name. Where space is scarce, several lines have no values: those are
    below the plot.
    """
    if figure.stacked:
        return []
    lines = [(each.name, each.color, last) for each in figure.series
             if each.name and not each.upper and each.values and (last := each.values[-1]) is not None]  # fmt: skip
    lines += [(name, "levels", value) for name, value in figure.limits.items()]
    has_names, has_values = len(lines) > 1, len(lines) == 1 or figure.broad
    wanted = sorted((1 - upwards.place(value), name, kind, value) for name, kind, value in lines)
    tops = spread_apart([top for top, *_ in wanted], gap=LABEL_GAP)
    return [
        EndLabel(" ".join([name] * has_names + [SHOW[figure.unit](value)] * has_values), kind, top)
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


def _short(value: float) -> float:
    """Return `value` rounded to the digits that are shown, which keeps the page small."""
    if value == 0 or not math.isfinite(value):
        return 0
    short = float(f"{value:.{POINTER_DIGITS}g}")
    return int(short) if short == int(short) else short


def stacked_bar(parts: Mapping[str, float], kinds: Mapping[str, str]) -> Html:
    total, passed, shapes, items = math.fsum(parts.values()) or 1.0, 0.0, [], []
    for name, part in parts.items():
        label = f"{name} {show_seconds(part)} ({part / total:.1%})"
        x, width = round(passed / total * SIZE, 1), round(part / total * SIZE, 1)
        shapes.append(tag("rect", {"class": f"fill {kinds[name]}", "x": x, "width": width, "y": 0, "height": SIZE},
                          tag("title", None, label)))  # fmt: skip
        items.append((label, kinds[name]))
        passed += part
    return tag("div", None, stretched(shapes, ", ".join(parts), kind="bar"), legend(items))


def _draw_scatter(figure: Scatter) -> Html:
    names = list(dict.fromkeys(point.kind for point in figure.points))
    kinds = color_kinds(names, figure.colors)
    most = max((point.x for point in figure.points), default=0.0)
    limit = [figure.x_limit] if figure.x_limit and figure.x_limit <= MAX_LIMIT_FACTOR * most else []
    across = axis_for([*(point.x for point in figure.points), *limit], figure.x_unit, from_zero=False)
    upwards = axis_for([point.y for point in figure.points], figure.y_unit, from_zero=False)
    shapes = [upright_line(across.place(each), "level") for each in limit]
    for point in sorted(figure.points, key=lambda point: point.kind in names[:1]):
        values = f"{show_value(point.x, figure.x_unit)}, {show_value(point.y, figure.y_unit)}"
        x, y = round(SIZE * across.place(point.x)), round(SIZE * (1 - upwards.place(point.y)))
        label = tag("title", None, f"{point.name}: {values}. {point.note}".strip())
        place = {"x1": x, "x2": x, "y1": y, "y2": y}
        shapes.append(tag("line", {"class": f"dot point {kinds[point.kind]}", **place}, label))
    limits = {figure.limit_name: show_value(figure.x_limit, figure.x_unit)} if limit else {}
    chart = _chart(figure.title, shapes, across, upwards, x_name=figure.x_name, y_name=figure.y_name)
    return titled(figure.title, legend(kinds.items(), limits), chart)


def _chart(
    title: str, shapes: Sequence[Html], across: FigureAxis, upwards: FigureAxis, *, x_name: str, y_name: str
) -> Html:
    """Return shapes over a grid, between axes with round ticks and names."""
    grid = grid_lines((tick.at for tick in across.ticks()), (tick.at for tick in upwards.ticks()))
    name = [tag("p", {"class": "axis-name"}, f"↑ {y_name}")] if y_name else []
    labels = [tag("text", {"x": "100%", "y": percent(1 - tick.at), "dy": "0.35em", "text-anchor": "end"}, tick.label)
              for tick in upwards.ticks()]  # fmt: skip
    y_axis = tag("svg", {"class": "axis upright", "aria-hidden": "true"}, *labels)
    return tag("div", None, *name, tag("div", {"class": "chart"}, y_axis,
               tag("div", {"class": "plot-area"}, stretched([*grid, *shapes], title)), x_axis(across.ticks())),
               tag("p", {"class": "axis-name across"}, f"{x_name} →"))  # fmt: skip


def _draw_bars(figure: Bars) -> Html:
    kinds = color_kinds([series.name for series in figure.series])
    totals = [math.fsum(series.values[at] or 0.0 for series in figure.series) for at in range(len(figure.categories))]
    axis = axis_for([*totals, *figure.limits.values()], figure.unit)
    rows = []
    for at, category in enumerate(figure.categories):
        shapes, passed = [], 0.0
        for series in figure.series:
            if value := series.values[at] or 0.0:
                start, end = axis.place(passed), axis.place(passed + value)
                place = {"x": percent(start), "width": percent(end - start), "y": 3, "height": ROW_HEIGHT - 6}
                label = tag("title", None, f"{series.name} {show_value(value, figure.unit)}")
                shapes.append(tag("rect", {"class": f"fill {kinds[series.name]}", **place}, label))
                passed += value
        for x in (percent(axis.place(limit)) for limit in figure.limits.values()):
            shapes.append(tag("line", {"class": "level", "x1": x, "x2": x, "y1": 0, "y2": ROW_HEIGHT}))
        rows.append(_row(shapes, category, axis, tag("td", {"class": "total"}, show_value(totals[at], figure.unit))))
    limits = {name: show_value(limit, figure.unit) for name, limit in figure.limits.items()}
    inside = tag("table", {"class": "bars"}, tag("tbody", None, *rows, _axis_row(axis, tag("td", None, ""))))
    return titled(figure.title, legend(kinds.items() if len(kinds) > 1 else (), limits), inside)


def _row(shapes: Sequence[Html], name: str, axis: FigureAxis, *cells: Html) -> Html:
    lines = [tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 0, "y2": ROW_HEIGHT})
             for x in (percent(tick.at) for tick in axis.ticks())]  # fmt: skip
    size = {"width": "100%", "height": ROW_HEIGHT, "role": "img", "aria-label": name}
    svg = tag("svg", {"class": "row", **size}, *lines, *shapes)
    return tag("tr", None, tag("th", {"scope": "row"}, name), tag("td", {"class": "bar-cell"}, svg), *cells)


def _axis_row(axis: FigureAxis, *cells: Html) -> Html:
    cell = tag("td", {"class": "bar-cell"}, x_axis(axis.ticks(MAX_ROW_TICKS)))
    return tag("tr", {"class": "axis-row"}, tag("th", None, ""), cell, *cells)


def _draw_timeline(figure: Timeline) -> Html:
    kinds = color_kinds(list(dict.fromkeys(span.kind for span in figure.spans)))
    axis = FigureAxis(0.0, max((span.end for span in figure.spans), default=1.0) or 1.0, figure.unit)
    by_row: list[list[Html]] = [[] for _ in figure.rows]
    for span in figure.spans:
        by_row[span.row].append(_span(figure, span, axis, f"fill {kinds[span.kind]}"))
    rows = [_row(shapes, name, axis) for name, shapes in zip(figure.rows, by_row, strict=True)]
    inside = tag("table", {"class": "timeline"}, tag("tbody", None, *rows, _axis_row(axis)))
    name = tag("p", {"class": "axis-name across"}, f"{figure.x_name} →")
    return titled(figure.title, legend(kinds.items()), inside, name)


def _span(figure: Timeline, span: Span, axis: FigureAxis, kind: str) -> Html:
    start, width = 100 * axis.place(span.start), 100 * (axis.place(span.end) - axis.place(span.start))
    when, is_moment = show_value(span.start, figure.unit), span.end == span.start
    when += "" if is_moment else f" - {show_value(span.end, figure.unit)}"
    title = tag(
        "title", None, f"{span.label}: {when}" if span.kind == span.label else f"{span.kind} {span.label}: {when}"
    )
    if is_moment:
        place = {"x": f"{min(start, 99.4):.2f}%", "width": 5, "y": 2, "height": ROW_HEIGHT - 4, "rx": 2}
        return tag("rect", {"class": kind, **place}, title)
    gap = 0.08 if width > 0.5 else 0.0
    place = {"x": f"{start:.2f}%", "width": f"{max(width - gap, MIN_PERCENT):.2f}%", "y": 2, "height": ROW_HEIGHT - 4}
    if len(figure.spans) > MAX_LABELLED or width < CHARACTER_PERCENT * (len(span.label) + 0.6):
        return tag("rect", {"class": kind, **place}, title)
    centre = {"class": "inside", "x": "50%", "y": "50%", "dy": "0.35em", "text-anchor": "middle"}
    return tag("svg", place, tag("rect", {"class": kind, "width": "100%", "height": "100%"}, title),
               tag("text", centre, span.label))  # fmt: skip


def _draw_matrix(figure: Matrix) -> Html:
    def cell_class(row: int, column: int) -> str:
        if figure.heat:
            heat = figure.heat[row][column]
            return "cell" if heat is None else f"cell heat heat-{round(SHADES * min(1.0, max(0.0, heat)))}"
        color = figure.colors[row][column] if figure.colors else 0
        return f"cell filled {KINDS[(color - 1) % len(KINDS)]}" if color else "cell"

    head = tag("tr", None, tag("th", None, ""), *(tag("th", {"scope": "col"}, name) for name in figure.columns))
    body = [
        tag("tr", None, tag("th", {"scope": "row"}, name),
            *(tag("td", {"class": cell_class(row, column)}, label) for column, label in enumerate(labels)))
        for row, (name, labels) in enumerate(zip(figure.rows, figure.labels, strict=True))
    ]  # fmt: skip
    inside = tag("table", {"class": "matrix"}, tag("thead", None, head), tag("tbody", None, *body))
    return titled(figure.title, tag("div", {"class": "scroll"}, inside))


def _draw_graph(figure: NodeGraph) -> Html:
    width, height = WIDE if figure.wide else SQUARE
    places = [(round(node.x * width, 1), round(node.y * height, 1)) for node in figure.nodes]
    kinds = color_kinds(list(dict.fromkeys(node.kind for node in figure.nodes)))
    pairs = {(each.source, each.target) for each in figure.arrows}
    shapes = [shape for each in figure.arrows for shape in _arrow(
        each, (figure.nodes[each.source].x * width, figure.nodes[each.source].y * height),
        (figure.nodes[each.target].x * width, figure.nodes[each.target].y * height), is_wide=figure.wide,
        is_double=(each.target, each.source) in pairs)]  # fmt: skip
    for node, (x, y) in zip(figure.nodes, places, strict=True):
        kind, (half_width, half_height) = f"node {kinds[node.kind]}", BOX
        if figure.wide:
            place = {"x": round(x - half_width, 1), "y": round(y - half_height, 1), "width": 2 * half_width,
                     "height": 2 * half_height, "rx": 9}  # fmt: skip
            shapes.append(tag("rect", {"class": kind, **place}))
        else:
            shapes.append(tag("circle", {"class": kind, "cx": x, "cy": y, "r": RADIUS}))
        shapes.append(_centred("node-name", x, y, node.name))
    svg = tag("svg", {"class": "graph wide-graph" if figure.wide else "graph", "viewBox": f"0 0 {width} {height}",
                      "role": "img", "aria-label": figure.title}, *shapes)  # fmt: skip
    return titled(figure.title, tag("div", {"class": "scroll"}, svg))


def _centred(kind: str, x: float, y: float, text: str) -> Html:
    place = {"x": round(x, 1), "y": round(y, 1), "dy": "0.35em", "text-anchor": "middle"}
    return tag("text", {"class": kind, **place}, text)


def _arrow(
    arrow: GraphArrow, source: tuple[float, float], target: tuple[float, float], *, is_wide: bool, is_double: bool
) -> Iterator[Html]:
    (x1, y1), (x2, y2) = source, target
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    away = 3.0 + RADIUS
    if is_wide:  # from the centre of a box to its edge in this direction
        away = 3.0 + min(BOX[0] / abs(dx) if dx else math.inf, BOX[1] / abs(dy) if dy else math.inf)
    shift = BESIDE if is_double else 0.0
    start = x1 + dx * away - dy * shift, y1 + dy * away + dx * shift
    end = x2 - dx * away - dy * shift, y2 - dy * away + dx * shift
    back = end[0] - dx * HEAD, end[1] - dy * HEAD
    corners = [end, *((back[0] - side * dy * 0.5 * HEAD, back[1] + side * dx * 0.5 * HEAD) for side in (1, -1))]
    yield tag("line", {"class": "edge", "x1": round(start[0], 1), "y1": round(start[1], 1), "x2": round(back[0], 1),
                       "y2": round(back[1], 1)})  # fmt: skip
    yield tag("polygon", {"class": "edge-head", "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)})
    if arrow.text:
        x, y = (start[0] + end[0]) / 2 + dy * 14, (start[1] + end[1]) / 2 - dx * 14
        yield _centred("edge-text", x, y, arrow.text)


DRAWN: Mapping[type, Callable[..., Html]] = {
    Lines: draw_lines,
    Scatter: _draw_scatter,
    Bars: _draw_bars,
    Timeline: _draw_timeline,
    Matrix: _draw_matrix,
    NodeGraph: _draw_graph,
}

"""Figures of views that have a row for each thing: stacked bars, and timelines. Coordinates are percents."""

import math
from collections.abc import Iterator, Mapping

from trimaran.ui.report.figure_axes import FigureAxis, axis_for, percent, x_axis
from trimaran.ui.report.figure_parts import color_kinds, legend, titled
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Bars, Span, Timeline
from trimaran.ui.viz.show_values import show_value

ROW_HEIGHT = 26
MAX_ROW_TICKS = 4  # beside the names of rows and their totals an axis is narrow on a phone
MAX_LABELLED = 700  # spans of a timeline that have their labels inside
CHARACTER_PERCENT = 0.85  # of the width of a timeline that one character of a label needs
MIN_PERCENT = 0.12  # of the width, so that a short span can be seen


def draw_bars(figure: Bars) -> Html:
    """Return one stacked bar for each category, over a common axis."""
    kinds = color_kinds([series.name for series in figure.series])
    totals = [math.fsum(series.values[at] or 0.0 for series in figure.series) for at in range(len(figure.categories))]
    axis = axis_for([*totals, *figure.limits.values()], figure.unit)
    rows = [
        tag("tr", None, tag("th", {"scope": "row"}, category),
            tag("td", {"class": "bar-cell"}, _bar(figure, at, axis, kinds)),
            tag("td", {"class": "total"}, show_value(totals[at], figure.unit)))
        for at, category in enumerate(figure.categories)
    ]  # fmt: skip
    rows.append(_axis_row(axis, has_total=True))
    limits = {name: show_value(limit, figure.unit) for name, limit in figure.limits.items()}
    table = tag("table", {"class": "bars"}, tag("tbody", None, *rows))
    return titled(figure.title, legend(kinds if len(kinds) > 1 else {}, limits), table)


def _axis_row(axis: FigureAxis, *, has_total: bool = False) -> Html:
    end = [tag("td", None, "")] if has_total else []
    cell = tag("td", {"class": "bar-cell"}, x_axis(axis.ticks(MAX_ROW_TICKS)))
    return tag("tr", {"class": "axis-row"}, tag("th", None, ""), cell, *end)


def _row(shapes: list[Html], name: str, axis: FigureAxis) -> Html:
    """Return a row's drawing, with the lines of the grid behind it."""
    lines = [tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 0, "y2": ROW_HEIGHT})
             for x in (percent(tick.at) for tick in axis.ticks())]  # fmt: skip
    size = {"width": "100%", "height": ROW_HEIGHT, "role": "img", "aria-label": name}
    return tag("svg", {"class": "row", **size}, *lines, *shapes)


def _bar(figure: Bars, at: int, axis: FigureAxis, kinds: Mapping[str, str]) -> Html:
    shapes, passed = [], 0.0
    for series in figure.series:
        value = series.values[at] or 0.0
        start, end = axis.place(passed), axis.place(passed + value)
        place = {"x": percent(start), "width": percent(end - start), "y": 3, "height": ROW_HEIGHT - 6}
        label = tag("title", None, f"{series.name} {show_value(value, figure.unit)}")
        if value:
            shapes.append(tag("rect", {"class": f"fill {kinds[series.name]}", **place}, label))
        passed += value
    for limit in figure.limits.values():
        x = percent(axis.place(limit))
        shapes.append(tag("line", {"class": "level", "x1": x, "x2": x, "y1": 0, "y2": ROW_HEIGHT}))
    return _row(shapes, figure.categories[at], axis)


def draw_timeline(figure: Timeline) -> Html:
    """Return rows of spans over a common axis of time."""
    kinds = color_kinds(list(dict.fromkeys(span.kind for span in figure.spans)))
    end = max((span.end for span in figure.spans), default=1.0) or 1.0
    axis = FigureAxis(0.0, end, figure.unit)
    is_labelled = len(figure.spans) <= MAX_LABELLED
    by_row: dict[int, list[Html]] = {number: [] for number in range(len(figure.rows))}
    for span in figure.spans:
        by_row[span.row] += _span(figure, span, axis, kinds[span.kind], is_labelled=is_labelled)
    rows = [
        tag("tr", None, tag("th", {"scope": "row"}, name),
            tag("td", {"class": "bar-cell"}, _row(by_row[number], name, axis)))
        for number, name in enumerate(figure.rows)
    ]  # fmt: skip
    rows.append(_axis_row(axis))
    table = tag("table", {"class": "timeline"}, tag("tbody", None, *rows))
    return titled(figure.title, legend(kinds), table, tag("p", {"class": "axis-name across"}, f"{figure.x_name} →"))


def _span(figure: Timeline, span: Span, axis: FigureAxis, kind: str, *, is_labelled: bool) -> Iterator[Html]:
    start, width = 100 * axis.place(span.start), 100 * (axis.place(span.end) - axis.place(span.start))
    if span.end > span.start:
        when = f"{show_value(span.start, figure.unit)} - {show_value(span.end, figure.unit)}"
    else:
        when = show_value(span.start, figure.unit)
    title = tag(
        "title", None, f"{span.kind} {span.label}: {when}" if span.kind != span.label else f"{span.label}: {when}"
    )
    if span.end == span.start:  # a moment
        place = {"x": f"{min(start, 99.4):.2f}%", "width": 5, "y": 2, "height": ROW_HEIGHT - 4, "rx": 2}
        yield tag("rect", {"class": f"fill {kind}", **place}, title)
        return
    gap = 0.08 if width > 0.5 else 0.0
    place = {"x": f"{start:.2f}%", "width": f"{max(width - gap, MIN_PERCENT):.2f}%", "y": 2, "height": ROW_HEIGHT - 4}
    if not is_labelled or width < CHARACTER_PERCENT * (len(span.label) + 0.6):
        yield tag("rect", {"class": f"fill {kind}", **place}, title)
        return
    inside = [
        tag("rect", {"class": f"fill {kind}", "width": "100%", "height": "100%"}, title),
        tag("text", {"class": "inside", "x": "50%", "y": "50%", "dy": "0.35em", "text-anchor": "middle"}, span.label),
    ]
    yield tag("svg", place, *inside)

"""Lines and scatter plots of views, with both axes, their names, and the values under the pointer."""

import json
from collections.abc import Mapping, Sequence

from trimaran.ui.report.figure_axes import FigureAxis, axis_for, grid_lines, x_axis, y_axis
from trimaran.ui.report.figure_parts import color_kinds, legend, titled
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Lines, Scatter, Unit, ValueSeries
from trimaran.ui.viz.show_values import show_value

MAX_LIMIT_FACTOR = 3.0  # times the largest value; a line further away would press the points together
SIZE = 1000  # of a drawing in its own coordinates; the page stretches it
SCRIPT_UNITS: Mapping[Unit, str] = {"bytes/second": "bytes/s", "fraction": "share", "count": "number", "": "number",
                                    "currency": "number"}  # fmt: skip


def draw_lines(figure: Lines) -> Html:
    """Return lines over both axes. Values under the pointer are shown by `page.js`."""
    kinds = color_kinds([series.name for series in figure.series])
    values = [each for series in figure.series for each in series.values if each is not None]
    across = axis_for(figure.x, figure.x_unit, log=figure.log_x, from_zero=False)
    if not figure.log_x:
        across = FigureAxis(min(figure.x), max(figure.x), figure.x_unit)
    upwards = axis_for([*values, *figure.limits.values()], figure.unit, log=figure.log_y)
    shapes = grid_lines(across.ticks(), upwards.ticks(), SIZE)
    for name, limit in figure.limits.items():
        y = round(SIZE * (1 - upwards.place(limit)))
        shapes.append(tag("line", {"class": "level", "x1": 0, "x2": SIZE, "y1": y, "y2": y}, tag("title", None, name)))
    for series in figure.series:
        shapes += _curve(figure, series, kinds[series.name], across, upwards)
    shapes.append(tag("line", {"class": "pointer", "x1": 0, "x2": 0, "y1": 0, "y2": SIZE}))
    limits = {name: show_value(limit, figure.unit) for name, limit in figure.limits.items()}
    key = legend(kinds if len(kinds) > 1 or limits else {}, limits)
    chart = _chart(figure.title, shapes, across, upwards, x_name=figure.x_name, y_name="")
    return titled(figure.title, key, chart, tag("output", None), data=_values(figure, across))


def _curve(figure: Lines, series: ValueSeries, kind: str, across: FigureAxis, upwards: FigureAxis) -> list[Html]:
    points = [(round(SIZE * across.place(x)), round(SIZE * (1 - upwards.place(value))))
              for x, value in zip(figure.x, series.values, strict=True) if value is not None]  # fmt: skip
    if series.name in figure.dots or len(points) == 1:
        return [tag("line", {"class": f"dot {kind}", "x1": x, "x2": x, "y1": y, "y2": y}) for x, y in points]
    return [tag("polyline", {"class": f"line {kind}", "points": " ".join(f"{x},{y}" for x, y in points)})]


def _values(figure: Lines, across: FigureAxis) -> str:
    """Return the JSON for `page.js`: the values of each line, and both ends of the x axis, as they are drawn."""
    position = across._position
    series = [
        {"name": each.name, "points": [[round(position(x), 6), value]
                                       for x, value in zip(figure.x, each.values, strict=True) if value is not None]}
        for each in figure.series
    ]  # fmt: skip
    unit = SCRIPT_UNITS.get(figure.x_unit, figure.x_unit)
    axis = {"low": position(across.low), "high": position(across.high), "since": None,
            "x": {"name": figure.x_name, "unit": unit, "log": across.log}}  # fmt: skip
    tree = {"unit": SCRIPT_UNITS.get(figure.unit, figure.unit), "axis": axis, "series": series}
    return json.dumps(tree, separators=(",", ":"))


def draw_scatter(figure: Scatter) -> Html:
    """Return points in two dimensions; what each is, is shown when the pointer is on it."""
    names = list(dict.fromkeys(point.kind for point in figure.points))
    kinds = color_kinds(names, figure.colors)
    most = max((point.x for point in figure.points), default=0.0)
    limit = [figure.x_limit] if figure.x_limit and figure.x_limit <= MAX_LIMIT_FACTOR * most else []
    across = axis_for([*(point.x for point in figure.points), *limit], figure.x_unit, from_zero=False)
    upwards = axis_for([point.y for point in figure.points], figure.y_unit, from_zero=False)
    shapes = grid_lines(across.ticks(), upwards.ticks(), SIZE)
    for each in limit:
        x = round(SIZE * across.place(each))
        shapes.append(tag("line", {"class": "level", "x1": x, "x2": x, "y1": 0, "y2": SIZE}))
    for point in sorted(figure.points, key=lambda point: point.kind in names[:1]):
        values = f"{show_value(point.x, figure.x_unit)}, {show_value(point.y, figure.y_unit)}"
        x, y = round(SIZE * across.place(point.x)), round(SIZE * (1 - upwards.place(point.y)))
        label = tag("title", None, f"{point.name}: {values}. {point.note}".strip())
        shapes.append(
            tag("line", {"class": f"dot point {kinds[point.kind]}", "x1": x, "x2": x, "y1": y, "y2": y}, label)
        )
    limits = {figure.limit_name: show_value(figure.x_limit, figure.x_unit)} if limit else {}
    chart = _chart(figure.title, shapes, across, upwards, x_name=figure.x_name, y_name=figure.y_name)
    return titled(figure.title, legend(kinds, limits), chart)


def _chart(
    title: str, shapes: Sequence[Html], across: FigureAxis, upwards: FigureAxis, *, x_name: str, y_name: str
) -> Html:
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "role": "img",
                      "aria-label": title}, *shapes)  # fmt: skip
    name = [tag("p", {"class": "axis-name"}, f"↑ {y_name}")] if y_name else []
    return tag("div", None, *name, tag("div", {"class": "chart"}, y_axis(upwards.ticks()),
               tag("div", {"class": "plot-area"}, svg), x_axis(across.ticks())),
               tag("p", {"class": "axis-name across"}, f"{x_name} →"))  # fmt: skip

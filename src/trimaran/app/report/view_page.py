"""A view as one self-contained HTML page, and its figures as markup that other pages use, too."""

import math
from collections.abc import Iterator, Mapping, Sequence

from trimaran.app.report.document import html_document
from trimaran.app.report.markup import Html, tag
from trimaran.app.report.plot import Curve, Plot, draw, swatch
from trimaran.app.report.sections import table
from trimaran.app.views.viz_view import show_value
from trimaran.viz import Figure, Formula, Mode, PlanView
from trimaran.viz.figures import Bars, Lines, Matrix, Scatter, Span, Table, Timeline, ValueSeries

KINDS = ("blue", "orange", "green", "purple", "sky", "red", "brown", "yellow", "grey")
WIDTH, ROW_HEIGHT, SCATTER_HEIGHT = 1000, 26, 360
MAX_LABELLED = 600  # spans of a timeline that have their labels inside
LABEL_CHARACTER_WIDTH = 7  # in units of the picture
TITLES = {"explain": "Explained", "simulate": "Simulated", "live": "Measured"}


def view_page(view: PlanView) -> str:
    """Return the page of a view: every mode with its sentences, formulas and figures."""
    head = tag("header", None, tag("h1", None, view.title), tag("p", {"class": "lead"}, view.question),
               tag("p", {"class": "quiet"}, view.about))  # fmt: skip
    return html_document(view.title, [head, *(_mode(TITLES[name], mode) for name, mode in view.modes.items())])


def _mode(title: str, mode: Mode) -> Html:
    sentences = [tag("p", None, sentence) for sentence in mode.sentences]
    formulas = [_formulas(mode.formulas)] if mode.formulas else []
    matrices = [draw_figure(each) for each in mode.figures if isinstance(each, Matrix)]
    if len(matrices) > 1:  # steps of one thing, side by side
        matrices = [tag("div", {"class": "side"}, *matrices)]
    others = [draw_figure(each) for each in mode.figures if not isinstance(each, Matrix)]
    return tag("section", None, tag("h2", None, title), *sentences, *formulas, *matrices, *others)


def _formulas(formulas: Sequence[Formula]) -> Html:
    rows = [(each.name, each.symbols, each.numbers, show_value(each.value, each.unit)) for each in formulas]
    return table(("", "formula", "with your numbers", "result"), rows)


def draw_figure(figure: Figure) -> Html:
    """Return a figure with its title."""
    match figure:
        case Bars():
            return _titled(figure.title, _bars(figure))
        case Lines():
            return _lines(figure)
        case Scatter():
            return _titled(figure.title, _scatter(figure))
        case Timeline():
            return _titled(figure.title, _timeline(figure))
        case Matrix():
            return _titled(figure.title, _matrix(figure))
        case Table():
            return _titled(figure.title, table(figure.columns, figure.rows))


def _titled(title: str, *parts: Html) -> Html:
    return tag("figure", {"class": "view"}, tag("figcaption", None, tag("h3", None, title)), *parts)


def _kinds(names: Sequence[str]) -> Mapping[str, str]:
    return {name: KINDS[number % len(KINDS)] for number, name in enumerate(names)}


def _legend(kinds: Mapping[str, str]) -> Html:
    return tag("ul", {"class": "legend"}, *(tag("li", None, swatch(kind), name) for name, kind in kinds.items()))


def _bars(figure: Bars) -> Html:
    kinds = _kinds([series.name for series in figure.series])
    totals = [math.fsum(series.values[at] or 0.0 for series in figure.series) for at in range(len(figure.categories))]
    most = max([*totals, *figure.limits.values()], default=0.0) or 1.0
    rows = [
        tag("tr", None, tag("th", None, category), tag("td", {"class": "bar-cell"}, _bar(figure, at, most, kinds)),
            tag("td", None, show_value(totals[at], figure.unit)))
        for at, category in enumerate(figure.categories)
    ]  # fmt: skip
    limits = [tag("p", {"class": "quiet"}, f"the line: {name}, {show_value(limit, figure.unit)}")
              for name, limit in figure.limits.items()]  # fmt: skip
    legend = _legend(kinds) if len(kinds) > 1 else Html("")
    return tag("div", None, tag("table", {"class": "bars"}, tag("tbody", None, *rows)), legend, *limits)


def _bar(figure: Bars, at: int, most: float, kinds: Mapping[str, str]) -> Html:
    shapes, passed = [], 0.0
    for series in figure.series:
        value = series.values[at] or 0.0
        label = f"{series.name} {show_value(value, figure.unit)}"
        shapes.append(_rect(kinds[series.name], passed / most * WIDTH, value / most * WIDTH, 0, ROW_HEIGHT, label))
        passed += value
    for limit in figure.limits.values():
        x = round(limit / most * WIDTH, 1)
        shapes.append(tag("line", {"class": "level", "x1": x, "x2": x, "y1": 0, "y2": ROW_HEIGHT}))
    return _svg(ROW_HEIGHT, shapes, figure.categories[at], stretched=True)


def _rect(kind: str, x: float, width: float, y: float, height: float, label: str) -> Html:
    place = {"x": round(x, 2), "width": round(max(width, 0.0), 2), "y": round(y, 2), "height": round(height, 2)}
    return tag("rect", {"class": f"fill {kind}", **place}, tag("title", None, label))


def _svg(height: float, shapes: Sequence[Html], name: str, *, stretched: bool = False) -> Html:
    how = {"preserveAspectRatio": "none"} if stretched else {}
    size = f"0 0 {WIDTH} {height:g}"
    return tag("svg", {"viewBox": size, "class": "drawing", "role": "img", "aria-label": name, **how}, *shapes)


def _lines(figure: Lines) -> Html:
    if figure.log_x and figure.x_unit != "bytes":  # the plots have no such axis
        names = (figure.x_name, *(series.name for series in figure.series))
        values = zip(*(series.values for series in figure.series), strict=True)
        rows = [(f"{at:g}", *(show_value(each, figure.unit) for each in row))
                for at, row in zip(figure.x, values, strict=True)]  # fmt: skip
        return _titled(figure.title, table(names, rows))
    kinds = _kinds([series.name for series in figure.series])
    x = [math.log2(each) for each in figure.x] if figure.log_x else figure.x
    curves = [Curve(name=series.name, kind=kinds[series.name], points=_points(x, series)) for series in figure.series]
    unit = {"bytes/second": "bytes/s", "count": ""}.get(figure.unit, figure.unit)
    plot = Plot(title=figure.title, unit=unit, curves=curves, may_log=figure.log_y, wide=True, by_size=figure.log_x,
                since=0.0 if figure.x_unit == "seconds" else None)  # fmt: skip
    return tag("div", {"class": "plots"}, draw(plot))


def _points(x: Sequence[float], series: ValueSeries) -> list[tuple[float, float]]:
    return [(at, value) for at, value in zip(x, series.values, strict=True) if value is not None]


def _scatter(figure: Scatter) -> Html:
    kinds = _kinds(list(dict.fromkeys(point.kind for point in figure.points)))
    x_low, x_high = _range([*(point.x for point in figure.points), *([figure.x_limit] if figure.x_limit else [])])
    y_low, y_high = _range([point.y for point in figure.points])
    shapes = []
    if figure.x_limit:
        x = round((figure.x_limit - x_low) / (x_high - x_low) * WIDTH, 1)
        shapes.append(tag("line", {"class": "level", "x1": x, "x2": x, "y1": 0, "y2": SCATTER_HEIGHT}))
    for point in figure.points:
        values = f"{show_value(point.x, figure.x_unit)}, {show_value(point.y, figure.y_unit)}"
        x = round((point.x - x_low) / (x_high - x_low) * WIDTH, 1)
        y = round((y_high - point.y) / (y_high - y_low) * SCATTER_HEIGHT, 1)
        place = {"class": f"fill {kinds[point.kind]}", "r": 6, "cx": x, "cy": y}
        shapes.append(tag("circle", place, tag("title", None, f"{point.name}: {values}. {point.note}")))
    across = f"{show_value(x_low, figure.x_unit)} to {show_value(x_high, figure.x_unit)}"
    upwards = f"{show_value(y_low, figure.y_unit)} to {show_value(y_high, figure.y_unit)}"
    axes = tag("p", {"class": "quiet"}, f"across: {figure.x_name}, {across}; upwards: {figure.y_name}, {upwards}")
    return tag("div", None, _svg(SCATTER_HEIGHT, shapes, figure.title), _legend(kinds), axes)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, a little beyond the smallest and the largest value."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
    return max(0.0, low - margin), high + margin


def _timeline(figure: Timeline) -> Html:
    kinds = _kinds(list(dict.fromkeys(span.kind for span in figure.spans)))
    end = max((span.end for span in figure.spans), default=1.0) or 1.0
    is_labelled = len(figure.spans) <= MAX_LABELLED
    rows = []
    for number, name in enumerate(figure.rows):
        shapes = [shape for span in figure.spans if span.row == number
                  for shape in _span(figure, span, end, kinds[span.kind], is_labelled=is_labelled)]  # fmt: skip
        cell = tag("td", {"class": "bar-cell"}, _svg(ROW_HEIGHT, shapes, name))
        rows.append(tag("tr", None, tag("th", None, name), cell))
    whole = tag("p", {"class": "quiet"}, f"the whole width is {show_value(end, figure.unit)}")
    return tag("div", None, tag("table", {"class": "timeline"}, tag("tbody", None, *rows)), _legend(kinds), whole)


def _span(figure: Timeline, span: Span, end: float, kind: str, *, is_labelled: bool) -> Iterator[Html]:
    x, width = span.start / end * WIDTH, (span.end - span.start) / end * WIDTH
    when = f"{show_value(span.start, figure.unit)} to {show_value(span.end, figure.unit)}"
    yield _rect(kind, x, max(width - 0.6, 0.6 * width), 1, ROW_HEIGHT - 2, f"{span.kind} {span.label}: {when}")
    if is_labelled and width > LABEL_CHARACTER_WIDTH * (len(span.label) + 0.5):
        place = {"x": round(x + width / 2, 2), "y": round(0.68 * ROW_HEIGHT, 2), "text-anchor": "middle"}
        yield tag("text", {"class": "inside", **place}, span.label)


def _matrix(figure: Matrix) -> Html:
    colors = figure.colors or tuple((0,) * len(row) for row in figure.labels)
    head = tag("tr", None, tag("th", None, ""), *(tag("th", None, name) for name in figure.columns))
    body = [
        tag("tr", None, tag("th", None, name),
            *(tag("td", {"class": f"cell {KINDS[(color - 1) % len(KINDS)]}" if color else "cell"}, label)
              for label, color in zip(labels, row, strict=True)))
        for name, labels, row in zip(figure.rows, figure.labels, colors, strict=True)
    ]  # fmt: skip
    inside = tag("table", {"class": "matrix"}, tag("thead", None, head), tag("tbody", None, *body))
    return tag("div", {"class": "scroll"}, inside)

"""A view as one self-contained HTML page, and its modes and figures as markup that other pages use, too."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimaran.ui.language import say
from trimaran.ui.report.figure_axis import KINDS, FigureAxis, axis_for, color_kinds, legend, percent, titled, x_axis
from trimaran.ui.report.markup import Html, html_document, note, tag
from trimaran.ui.report.plot import draw_lines, draw_scatter
from trimaran.ui.report.sections import table
from trimaran.ui.viz.figures import (
    Bars,
    Figure,
    FileText,
    GraphArrow,
    Lines,
    Matrix,
    Mode,
    NodeGraph,
    PlanView,
    Point,
    Scatter,
    Span,
    Table,
    Timeline,
    ValueSeries,
    show_value,
)

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
    return titled(figure.title, legend(kinds.items() if len(kinds) > 1 else (), limits), table)


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
    return titled(
        figure.title, legend(kinds.items()), table, tag("p", {"class": "axis-name across"}, f"{figure.x_name} →")
    )


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


SHADES = 10


def draw_matrix(figure: Matrix) -> Html:
    """Return the cells, each with its colour or its shade."""

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


SQUARE, WIDE = (420, 420), (900, 250)
RADIUS = 22  # of a round node
BOX = (56, 20)  # half the width and height of a node with a name of several letters
HEAD = 9  # length of an arrow's head
BESIDE = 9  # distance of two arrows between the same nodes


def draw_graph(figure: NodeGraph) -> Html:
    """Return the nodes as circles or boxes, and the arrows between them."""
    width, height = WIDE if figure.wide else SQUARE
    places = [(node.x * width, node.y * height) for node in figure.nodes]
    kinds = color_kinds(list(dict.fromkeys(node.kind for node in figure.nodes)))
    pairs = {(each.source, each.target) for each in figure.arrows}
    shapes: list[Html] = []
    for each in figure.arrows:
        is_double = (each.target, each.source) in pairs
        shapes += _arrow(each, places, is_wide=figure.wide, is_double=is_double)
    for node, (x, y) in zip(figure.nodes, places, strict=True):
        shapes.append(_outline(x, y, kinds[node.kind], is_wide=figure.wide))
        shapes.append(tag("text", {"class": "node-name", "x": round(x, 1), "y": round(y, 1), "dy": "0.35em",
                                   "text-anchor": "middle"}, node.name))  # fmt: skip
    svg = tag("svg", {"class": "graph wide-graph" if figure.wide else "graph", "viewBox": f"0 0 {width} {height}",
                      "role": "img", "aria-label": figure.title}, *shapes)  # fmt: skip
    return titled(figure.title, tag("div", {"class": "scroll"}, svg))


def _outline(x: float, y: float, kind: str, *, is_wide: bool) -> Html:
    if not is_wide:
        return tag("circle", {"class": f"node {kind}", "cx": round(x, 1), "cy": round(y, 1), "r": RADIUS})
    half_width, half_height = BOX
    place = {"x": round(x - half_width, 1), "y": round(y - half_height, 1), "width": 2 * half_width,
             "height": 2 * half_height, "rx": 9}  # fmt: skip
    return tag("rect", {"class": f"node {kind}", **place})


def _arrow(arrow: GraphArrow, places: list[tuple[float, float]], *, is_wide: bool, is_double: bool) -> list[Html]:
    """Return a line from the edge of one node to the edge of another, with a head, and its text beside the middle."""
    (x1, y1), (x2, y2) = places[arrow.source], places[arrow.target]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    along, aside = ((x2 - x1) / length, (y2 - y1) / length), (-(y2 - y1) / length, (x2 - x1) / length)
    away = _edge(along, is_wide=is_wide) + 3
    shift = BESIDE if is_double else 0.0
    start = x1 + along[0] * away + aside[0] * shift, y1 + along[1] * away + aside[1] * shift
    end = x2 - along[0] * away + aside[0] * shift, y2 - along[1] * away + aside[1] * shift
    back = end[0] - along[0] * HEAD, end[1] - along[1] * HEAD
    corners = [
        end,
        *((back[0] + side * aside[0] * 0.5 * HEAD, back[1] + side * aside[1] * 0.5 * HEAD) for side in (1, -1)),
    ]
    shapes = [
        tag("line", {"class": "edge", "x1": _r(start[0]), "y1": _r(start[1]), "x2": _r(back[0]), "y2": _r(back[1])}),
        tag("polygon", {"class": "edge-head", "points": " ".join(f"{_r(x)},{_r(y)}" for x, y in corners)}),
    ]
    if arrow.text:
        x, y = (start[0] + end[0]) / 2 - aside[0] * 14, (start[1] + end[1]) / 2 - aside[1] * 14
        shapes.append(tag("text", {"class": "edge-text", "x": _r(x), "y": _r(y), "dy": "0.35em",
                                   "text-anchor": "middle"}, arrow.text))  # fmt: skip
    return shapes


def _edge(along: tuple[float, float], *, is_wide: bool) -> float:
    """Return the distance from the centre of a node to its edge in this direction."""
    if not is_wide:
        return RADIUS
    across, up = (BOX[0] / abs(along[0]) if along[0] else math.inf), (BOX[1] / abs(along[1]) if along[1] else math.inf)
    return min(across, up)


def _r(value: float) -> float:
    return round(value, 1)


TITLES = {"explain": "Explained", "simulate": "Simulated", "live": "Measured"}
MAX_UNBROKEN = 14  # characters of a cell that stay on one line
FORMULA_COLUMNS = ("", "formula", "with your numbers", "result")


def view_page(view: PlanView) -> str:
    """Return the page of a view: every mode with its sentences, formulas and figures."""
    head = tag("header", None, tag("h1", None, view.title), tag("p", {"class": "lead"}, view.question),
               tag("p", {"class": "quiet"}, view.about))  # fmt: skip
    modes = [tag("section", None, tag("h2", None, TITLES[name]), *draw_mode(mode)) for name, mode in view.modes.items()]
    return html_document(view.title, [head, *modes])


def draw_mode(mode: Mode) -> Iterator[Html]:
    """Yield the sentences, the formulas and the figures of a mode, whose texts are in their language already."""
    yield from (tag("p", None, sentence) for sentence in mode.sentences)
    if mode.formulas:
        rows = [(each.name, each.symbols, each.numbers, show_value(each.value, each.unit)) for each in mode.formulas]
        yield tag("div", {"class": "formulas"}, table(tuple(map(say, FORMULA_COLUMNS)), rows))
    steps: list[Html] = []
    for figure in mode.figures:
        if isinstance(figure, Matrix):  # several are steps of one thing, side by side
            steps.append(draw_figure(figure))
            continue
        yield from _side_by_side(steps)
        steps = []
        yield draw_figure(figure)
    yield from _side_by_side(steps)


def _side_by_side(figures: Sequence[Html]) -> Iterator[Html]:
    if len(figures) > 1:
        yield tag("div", {"class": "side steps"}, *figures)
    else:
        yield from figures


def draw_figure(figure: Figure) -> Html:
    """Return a figure with its title."""
    match figure:
        case Bars():
            return draw_bars(figure)
        case Lines():
            return draw_lines(figure)
        case Scatter():
            return draw_scatter(figure)
        case Timeline():
            return draw_timeline(figure)
        case Matrix():
            return draw_matrix(figure)
        case Table():
            rows = [[_unbroken(cell) for cell in row] for row in figure.rows]
            return titled(figure.title, table(figure.columns, rows))
        case NodeGraph():
            return draw_graph(figure)
        case FileText():
            kind = "file" if "\n" in figure.content.strip() else None
            return titled(figure.title, tag("div", {"class": kind}, tag("pre", {"class": "command"}, figure.content)))


def _unbroken(cell: str) -> str:
    """Return a short cell, such as `7.2 s`, so that it stays on one line."""
    return cell.replace(" ", "\u00a0") if len(cell) <= MAX_UNBROKEN else cell


Tree = dict[str, Any]
PARTS = {"series": ValueSeries, "points": Point, "spans": Span}
FIGURES = {each.__name__.lower(): each for each in (Bars, Lines, Scatter, Timeline, Matrix, Table)}


def views(facts: Tree) -> Html:
    """Return the views, each with its question, what it says, and its figures."""
    return Html("".join([*map(_view, facts["views"]), note(facts["views_trouble"])]))


def _view(view: Tree) -> Html:
    sentences = [tag("p", None, say(each)) for each in view["sentences"]]
    figures = [draw_figure(figure_of(each)) for each in view["figures"]]
    title = [tag("h3", None, say(view["title"])), note(say(view["question"]))]
    return tag("div", {"class": "run-view"}, *title, *sentences, *figures)


def figure_of(tree: Tree) -> Figure:
    """Return the figure that `view_as_dict` wrote."""
    fields: Tree = {name: tuple(PARTS[name](**each) for each in value) if name in PARTS else value
              for name, value in tree.items() if name != "kind"}  # fmt: skip
    return FIGURES[tree["kind"]](**fields)

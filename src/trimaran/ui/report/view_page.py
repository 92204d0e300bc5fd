"""A view as one self-contained HTML page, and its modes and figures as markup that other pages use, too."""

from collections.abc import Iterator, Sequence

from trimaran.ui.report.document import html_document
from trimaran.ui.report.figure_cells import draw_matrix
from trimaran.ui.report.figure_chart import draw_lines, draw_scatter
from trimaran.ui.report.figure_graph import draw_graph
from trimaran.ui.report.figure_parts import titled
from trimaran.ui.report.figure_rows import draw_bars, draw_timeline
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.sections import table
from trimaran.ui.viz.figures import (
    Bars,
    Figure,
    FileText,
    Formula,
    Lines,
    Matrix,
    Mode,
    NodeGraph,
    PlanView,
    Scatter,
    Table,
    Timeline,
)
from trimaran.ui.viz.show_values import show_value
from trimaran.ui.viz.texts import Lookup

TITLES = {"explain": "Explained", "simulate": "Simulated", "live": "Measured"}
MAX_UNBROKEN = 14  # characters of a cell that stay on one line
FORMULA_COLUMNS = ("", "formula", "with your numbers", "result")


def view_page(view: PlanView) -> str:
    """Return the page of a view: every mode with its sentences, formulas and figures."""
    head = tag("header", None, tag("h1", None, view.title), tag("p", {"class": "lead"}, view.question),
               tag("p", {"class": "quiet"}, view.about))  # fmt: skip
    modes = [tag("section", None, tag("h2", None, TITLES[name]), *draw_mode(mode)) for name, mode in view.modes.items()]
    return html_document(view.title, [head, *modes])


def draw_mode(mode: Mode, lookup: Lookup = lambda _: None) -> Iterator[Html]:
    """Yield the sentences, the formulas and the figures of a mode, whose texts are in their language already.

    `lookup` translates what this function adds: the heads of the columns of formulas.
    """
    yield from (tag("p", None, sentence) for sentence in mode.sentences)
    if mode.formulas:
        yield _formulas(mode.formulas, lookup)
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


def _formulas(formulas: Sequence[Formula], lookup: Lookup) -> Html:
    rows = [(each.name, each.symbols, each.numbers, show_value(each.value, each.unit)) for each in formulas]
    columns = tuple(lookup(name) or name for name in FORMULA_COLUMNS)
    return tag("div", {"class": "formulas"}, table(columns, rows))


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

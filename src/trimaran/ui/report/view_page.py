"""A view as one self-contained HTML page, and its modes and figures as markup that other pages use, too."""

from collections.abc import Iterator, Sequence
from typing import Any

from trimaran.ui.language import say
from trimaran.ui.report.draw_figure import draw_figure
from trimaran.ui.report.markup import Html, html_document, note, table, tag
from trimaran.ui.viz.figures import (
    Bars,
    Figure,
    Lines,
    Matrix,
    Mode,
    PlanView,
    Point,
    Scatter,
    Span,
    Table,
    Timeline,
    ValueSeries,
    show_value,
)

TITLES = {"explain": "Explained", "simulate": "Simulated", "live": "Measured"}
FORMULA_COLUMNS = ("", "formula", "with your numbers", "result")


def view_page(view: PlanView) -> str:
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


Tree = dict[str, Any]
PARTS = {"series": ValueSeries, "points": Point, "spans": Span}
FIGURES = {each.__name__.lower(): each for each in (Bars, Lines, Scatter, Timeline, Matrix, Table)}


def views(facts: Tree) -> Html:
    return Html("".join([*map(_view, facts["views"]), note(facts["views_trouble"])]))


def _view(view: Tree) -> Html:
    sentences = [tag("p", None, say(each)) for each in view["sentences"]]
    figures = [draw_figure(figure_of(each)) for each in view["figures"]]
    title = [tag("h3", None, say(view["title"])), note(say(view["question"]))]
    return tag("div", {"class": "run-view"}, *title, *sentences, *figures)


def figure_of(tree: Tree) -> Figure:
    fields: Tree = {name: tuple(PARTS[name](**each) for each in value) if name in PARTS else value
              for name, value in tree.items() if name != "kind"}  # fmt: skip
    return FIGURES[tree["kind"]](**fields)

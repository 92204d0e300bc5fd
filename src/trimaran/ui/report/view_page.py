"""A view as one self-contained HTML page, and its modes and figures as markup that other pages use, too."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from trimaran.ui.language import say
from trimaran.ui.report.draw_figure import draw_figure
from trimaran.ui.report.markup import Html, html_document, note, table, tag
from trimaran.ui.viz.figures import (
    Bars,
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
    for is_matrix, figures in groupby(mode.figures, key=lambda each: isinstance(each, Matrix)):
        drawn = [draw_figure(each) for each in figures]
        if is_matrix and len(drawn) > 1:  # steps of one thing, side by side
            yield tag("div", {"class": "side steps"}, *drawn)
        else:
            yield from drawn


Tree = dict[str, Any]
PARTS = {"series": ValueSeries, "points": Point, "spans": Span}
FIGURES = {each.__name__.lower(): each for each in (Bars, Lines, Scatter, Timeline, Matrix, Table)}


def views(facts: Tree) -> Html:
    found = []
    for view in facts["views"]:
        parts = [tag("h3", None, say(view["title"])), note(say(view["question"]))]
        parts += [tag("p", None, say(each)) for each in view["sentences"]]
        for tree in view["figures"]:
            fields: Tree = {name: tuple(PARTS[name](**each) for each in value) if name in PARTS else value
                            for name, value in tree.items() if name != "kind"}  # fmt: skip
            parts.append(draw_figure(FIGURES[tree["kind"]](**fields)))
        found.append(tag("div", {"class": "run-view"}, *parts))
    return Html("".join([*found, note(facts["views_trouble"])]))

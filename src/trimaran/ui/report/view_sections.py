"""The views that suit a run's plan, drawn from its facts."""

from typing import Any

from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.tables import note
from trimaran.ui.report.view_page import draw_figure
from trimaran.ui.report.words import say
from trimaran.ui.viz.figures import Bars, Figure, Lines, Matrix, Point, Scatter, Span, Table, Timeline, ValueSeries

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

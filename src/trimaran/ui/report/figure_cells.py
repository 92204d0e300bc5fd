"""Figures of views that are tables: a matrix of coloured or shaded cells."""

from trimaran.ui.report.figure_parts import KINDS, titled
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Matrix

SHADES = 10


def draw_matrix(figure: Matrix) -> Html:
    """Return the cells, each with its colour or its shade."""
    head = tag("tr", None, tag("th", None, ""), *(tag("th", {"scope": "col"}, name) for name in figure.columns))
    body = [
        tag("tr", None, tag("th", {"scope": "row"}, name),
            *(tag("td", {"class": _class(figure, row, column)}, label) for column, label in enumerate(labels)))
        for row, (name, labels) in enumerate(zip(figure.rows, figure.labels, strict=True))
    ]  # fmt: skip
    inside = tag("table", {"class": "matrix"}, tag("thead", None, head), tag("tbody", None, *body))
    return titled(figure.title, tag("div", {"class": "scroll"}, inside))


def _class(figure: Matrix, row: int, column: int) -> str:
    if figure.heat:
        heat = figure.heat[row][column]
        return "cell" if heat is None else f"cell heat heat-{round(SHADES * min(1.0, max(0.0, heat)))}"
    color = figure.colors[row][column] if figure.colors else 0
    return f"cell filled {KINDS[(color - 1) % len(KINDS)]}" if color else "cell"

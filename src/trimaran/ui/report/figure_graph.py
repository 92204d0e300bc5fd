"""Graphs of views: nodes, and arrows between them."""

import math

from trimaran.ui.report.figure_parts import color_kinds, titled
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import GraphArrow, NodeGraph

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

"""Small pictures of the views for their gallery: what kind of figure each has."""

import math
from itertools import pairwise

from trimaran.ui.report.markup import Html, tag

WIDTH, HEIGHT = 120, 64


def view_icon(short: str) -> Html:
    """Return the picture of a view by its short name."""
    shapes = _SHAPES[short]()
    return tag("svg", {"class": "view-icon", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "aria-hidden": "true"}, *shapes)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Html:
    place = {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": round(height, 1), "rx": 1.5}
    return tag("rect", {"class": f"fill {kind}", **place})


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "edge") -> Html:
    return tag("line", {"class": kind, "x1": round(x1, 1), "y1": round(y1, 1), "x2": round(x2, 1), "y2": round(y2, 1)})


def _dot(kind: str, x: float, y: float, radius: float = 4) -> Html:
    return tag("circle", {"class": f"fill {kind}", "cx": round(x, 1), "cy": round(y, 1), "r": radius})


def _stacks(bars: list[list[tuple[str, float]]], level: float) -> list[Html]:
    shapes = []
    for row, parts in enumerate(bars):
        x = 6.0
        for kind, width in parts:
            shapes.append(_rect(kind, x, 8 + 14 * row, width, 10))
            x += width
    return [*shapes, _line(level, 4, level, HEIGHT - 4, "level")]


def _need() -> list[Html]:
    return _stacks([[("blue", 40), ("orange", 30), ("green", 26), ("purple", 14)],
                    [("blue", 12), ("orange", 10), ("green", 9), ("purple", 14)],
                    [("blue", 5), ("orange", 5), ("green", 4), ("purple", 14)]], 78)  # fmt: skip


def _strategies() -> list[Html]:
    points = [(20, 20), (34, 30), (50, 16), (46, 40), (66, 34), (80, 46), (96, 26), (104, 14)]
    return [*(_dot("orange", x, y, 3.5) for x, y in points), _dot("blue", 34, 52, 6), _line(88, 4, 88, 60, "level")]


def _life() -> list[Html]:
    xs = (14, 45, 76, 107)
    arrows = [*(_line(a + 9, 26, b - 9, 26) for a, b in pairwise(xs)), _line(74, 33, 65, 47), _line(55, 47, 47, 34)]
    return [*arrows, *(_dot("blue", x, 26, 8) for x in xs), _dot("red", 60, 52, 6)]


def _ddp() -> list[Html]:
    return [_rect("blue", 6, 12, 78, 14), *(_rect("orange", 18 + 24 * number, 36, 20, 14) for number in range(4))]


def _fsdp() -> list[Html]:
    tops = (4, 10, 6, 16, 8, 18, 10, 22)
    return [_rect("sky", 6 + 14 * number, HEIGHT - 8 - 2 * top, 12, 2 * top) for number, top in enumerate(tops)]


def _zero() -> list[Html]:
    rows = [(34, 34, 40), (34, 34, 10), (34, 9, 10), (9, 9, 10)]
    shapes = []
    for row, widths in enumerate(rows):
        x = 6
        for kind, width in zip(("blue", "orange", "green"), widths, strict=True):
            shapes.append(_rect(kind, x, 5 + 14 * row, width, 10))
            x += width
    return shapes


def _offload() -> list[Html]:
    return [_rect("blue", 8, 10, 44, 44), _rect("grey", 80, 6, 32, 52), _line(56, 24, 76, 24), _line(76, 40, 56, 40)]


def _pipeline() -> list[Html]:
    shapes = []
    for rank in range(4):
        for number in range(4):
            shapes.append(_rect("blue", 6 + 7 * (rank + number), 4 + 15 * rank, 6, 11))
            shapes.append(_rect("orange", 58 + 13 * number - 7 * rank + 4, 4 + 15 * rank, 11, 11))
    return shapes


def _tensor() -> list[Html]:
    kinds = ("blue", "orange", "green", "purple")
    columns = [_rect(kind, 8 + 11 * number, 10, 10, 44) for number, kind in enumerate(kinds)]
    return [*columns, *(_rect(kind, 68, 10 + 11 * number, 44, 10) for number, kind in enumerate(kinds))]


def _mesh() -> list[Html]:
    kinds = ("blue", "orange", "green", "purple")
    return [_rect(kinds[column % 4], 8 + 13 * column, 6 + 14 * row, 11, 11) for row in range(4) for column in range(8)]


def _collectives() -> list[Html]:
    places = [(60 + 24 * math.sin(math.pi * at / 3), 32 - 24 * math.cos(math.pi * at / 3)) for at in range(6)]
    lines = [_line(*places[at], *places[(at + 1) % 6]) for at in range(6)]
    return [*lines, *(_dot("blue" if at % 2 else "orange", x, y, 6) for at, (x, y) in enumerate(places))]


_SHAPES = {"need": _need, "strategies": _strategies, "life": _life, "ddp": _ddp, "fsdp": _fsdp, "zero": _zero,
           "offload": _offload, "pipeline": _pipeline, "tensor": _tensor, "mesh": _mesh,
           "collectives": _collectives}  # fmt: skip

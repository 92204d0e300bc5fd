"""Charts in text: a curve in braille dots, a stacked bar, and the intervals that many values are shown by."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


# The colour-blind safe palette of Okabe and Ito, readable on light and dark backgrounds.
ORANGE, SKY, GREEN, BLUE, RED, PURPLE = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"

DOTS_PER_CELL = 2  # in a row of a braille cell
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bit of the dot in row y, column x of a cell


def curve(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return `height` lines of `width` braille cells that plot `values`, which must be finite."""
    parts = intervals([1] * len(values), DOTS_PER_CELL * width)
    columns = [math.fsum(values[begin:end]) / (end - begin) for begin, end, _ in parts]
    if not columns:
        return [" " * width] * height
    low, high = min(columns), max(columns)
    top = 4 * height - 1
    rows = [round((high - value) / ((high - low) or 1) * top) for value in columns]
    step = (2 * width - 1) / max(1, len(rows) - 1)
    cells = [[_BLANK] * width for _ in range(height)]
    points = [(round(index * step), row) for index, row in enumerate(rows)]
    dots = [points[0]]  # on the straight lines between neighbouring points
    for (x0, y0), (x1, y1) in pairwise(points):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots += [(round(x0 + (x1 - x0) * part / length), round(y0 + (y1 - y0) * part / length))
                 for part in range(1, length + 1)]  # fmt: skip
    for x, y in dots:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(map(chr, row)) for row in cells]


def stacked_bar(parts: Mapping[str, float], colors: Mapping[str, str], *, width: int) -> "Text":
    """Return one bar of `width` cells split in proportion to `parts`; rounding errors do not add up."""
    from rich.text import Text

    bar, total, passed, drawn = Text(), sum(parts.values()) or 1.0, 0.0, 0
    for name, part in parts.items():
        passed += part
        end = round(passed / total * width)
        bar.append("█" * (end - drawn), style=colors[name])
        drawn = end
    return bar


def intervals(counts: Sequence[int], number: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, middle) of at most `number` parts of a list with about equal sums of `counts`."""
    sums = [0, *accumulate(counts)]
    total = sums[-1]
    bounds = [round(part * total / number) for part in range(number + 1)] if total > number else range(total + 1)
    indices = dict.fromkeys(bisect_left(sums, bound) for bound in bounds)
    for begin, end in pairwise(indices):
        yield begin, end, bisect_right(sums, (sums[begin] + sums[end]) // 2) - 1

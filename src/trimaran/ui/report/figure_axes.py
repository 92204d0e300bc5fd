"""Axes of figures: where ticks are and what they say; drawn in percent of the width, with letters in pixels."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Unit
from trimaran.ui.viz.show_values import show_value

MAX_TICKS = 5
MINUTES = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
AXIS_HEIGHT = 22


class Tick(NamedTuple):
    """A tick: its place, from 0 to 1, and its label."""

    at: float
    label: str


class FigureAxis(NamedTuple):
    """Maps values from `low` to `high` to the interval from 0 to 1; logarithmically with `log`."""

    low: float
    high: float
    unit: Unit
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is; values outside are at the ends."""
        low, high = self._position(self.low), self._position(self.high)
        at = (self._position(max(value, self.low)) - low) / ((high - low) or 1.0)
        return min(1.0, max(0.0, at))

    def _position(self, value: float) -> float:
        return math.log2(value) if self.log else value

    def ticks(self, most: int = MAX_TICKS) -> list[Tick]:
        values = _log_values(self, most) if self.log else _values(self, most)
        return [Tick(self.place(value), tick_label(value, self.unit)) for value in values]


def axis_for(values: Sequence[float], unit: Unit, *, log: bool = False, from_zero: bool = True) -> FigureAxis:
    """Return an axis for the values: from zero, or from a little below the smallest to a little above the largest."""
    finite = [each for each in values if math.isfinite(each)] or [1.0]
    low, high = min(finite), max(finite)
    if log and (positive := [each for each in finite if each > 0]) and max(positive) > min(positive):
        return FigureAxis(min(positive), max(positive), unit, log=True)
    if from_zero and low >= 0:
        low = 0.0
    elif not from_zero:  # points stay off the edges
        low, high = max(0.0, low - 0.06 * (high - low)) if low >= 0 else low, high + 0.06 * (high - low)
    high = high if high > low else low + (abs(low) or 1.0)
    step = _step((high - low) / MAX_TICKS, unit)
    return FigureAxis(math.floor(low / step) * step, math.ceil(round(high / step, 9)) * step, unit)


def tick_label(value: float, unit: Unit) -> str:
    """Return a value with its unit, without digits that say nothing: `20 GiB`, `1.5 s`."""
    if unit in ("count", "") and 1000 <= abs(value) < 1e5 and value == round(value):
        return f"{value:,.0f}"
    return re.sub(r"\.0(?=[ %kMBT/]|$)", "", show_value(value, unit)).replace(" 00 s", "")


def _values(axis: FigureAxis, most: int) -> list[float]:
    step = _step((axis.high - axis.low) / most, axis.unit)
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    return [each * step for each in range(first, last + 1)]


def _step(least: float, unit: Unit) -> float:
    """Return a round distance of ticks that is at least `least`; bytes are round in powers of two."""
    if least <= 0:
        return 1.0
    if unit == "seconds" and least > 20:
        days = 86_400 * _decimal(least / 86_400)
        return next((float(each) for each in MINUTES if each >= least), days)
    if unit in ("bytes", "bytes/second") and least > 1:
        power = 1024.0 ** math.floor(math.log(least, 1024))
        return power * next((each for each in (1, 2, 4, 5, 10, 20, 25, 50, 100, 128, 256, 512, 1024)
                             if each * power >= least * 0.999), 1024)  # fmt: skip
    step = _decimal(least)
    return max(1.0, step) if unit == "count" else step


def _decimal(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return power * next((each for each in (1, 2, 2.5, 5, 10) if each * power >= least * 0.999), 10)


def _log_values(axis: FigureAxis, most: int) -> list[float]:
    """Return powers of two for bytes, and for counts that are powers of two at both ends; else of ten."""
    is_binary = axis.unit == "bytes" or (axis.unit == "count" and all(
        math.log2(end).is_integer() for end in (axis.low, axis.high)))  # fmt: skip
    base = 2.0 if is_binary else 10.0
    first = math.ceil(math.log(axis.low, base) - 1e-9)
    last = math.floor(math.log(axis.high, base) + 1e-9)
    stride = next(each for each in (1, 2, 3, 4, 5, 10, 20, 40, 80) if (last - first) / each < most)
    values = [base**power for power in range(first, last + 1) if power % stride == 0]
    if len(values) < 3 and not is_binary:
        wider = [digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        values = [each for each in wider if axis.low * 0.999 <= each <= axis.high * 1.001]
    return values or [axis.low, axis.high]


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def x_axis(ticks: Sequence[Tick]) -> Html:
    """Return the ticks below a figure with their labels."""
    shapes = []
    for tick in ticks:
        x = percent(tick.at)
        anchor = "start" if tick.at < 0.03 else "end" if tick.at > 0.97 else "middle"
        shapes.append(tag("line", {"class": "tick", "x1": x, "x2": x, "y1": 0, "y2": 5}))
        shapes.append(tag("text", {"x": x, "y": 18, "text-anchor": anchor}, tick.label))
    return tag("svg", {"class": "axis", "width": "100%", "height": AXIS_HEIGHT, "aria-hidden": "true"}, *shapes)


def y_axis(ticks: Sequence[Tick]) -> Html:
    """Return the labels to the left of a figure."""
    shapes = []
    for tick in ticks:
        y = percent(1 - tick.at)
        shapes.append(tag("text", {"x": "100%", "y": y, "dy": "0.35em", "text-anchor": "end"}, tick.label))
    return tag("svg", {"class": "axis upright", "aria-hidden": "true"}, *shapes)


def grid_lines(across: Sequence[Tick], upwards: Sequence[Tick], size: int) -> list[Html]:
    """Return the lines of a grid in a drawing of `size` by `size`."""
    lines = [tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 0, "y2": size})
             for x in (round(tick.at * size) for tick in across)]  # fmt: skip
    return lines + [tag("line", {"class": "grid", "x1": 0, "x2": size, "y1": y, "y2": y})
                    for y in (round((1 - tick.at) * size) for tick in upwards)]  # fmt: skip

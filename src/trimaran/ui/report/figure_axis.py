"""Axes, legends, titles of figures. Places are in percent, or in units that the page stretches; letters in pixels."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.viz.figures import Unit, show_value

SIZE = 1000  # width and height of a drawing in its own coordinates; the page stretches it
MAX_TICKS = 5
PARTS = 4  # intervals between the grid lines of an even axis
MIN_LOG_RATIO = 50.0  # of the highest to the lowest value; above it an even axis may be logarithmic
MINUTES = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
AXIS_HEIGHT = 22
KINDS = ("blue", "orange", "green", "purple", "sky", "red", "brown", "yellow", "grey")
SHOW: Mapping[str, Callable[[float], str]] = {  # how a report writes values of its plots, by the units of `page.js`
    "number": lambda value: f"{value:.4g}",
    "count": show_count,
    "bytes": show_bytes,
    "bytes/s": lambda value: f"{show_bytes(value)}/s",
    "seconds": show_seconds,
    "share": lambda value: f"{value:.1%}",
    "W": lambda value: f"{value:.0f} W",
    "C": lambda value: f"{value:.0f} °C",
}


class Tick(NamedTuple):
    """A tick: its place, from 0 to 1, and its label."""

    at: float
    label: str


class FigureAxis(NamedTuple):
    """Maps values from `low` to `high` to the interval from 0 to 1; logarithmically with `log`."""

    low: float
    high: float
    unit: Unit = ""
    log: bool = False

    def position(self, value: float) -> float:
        return math.log2(value) if self.log else value

    def place(self, value: float) -> float:
        """Return where a value is; values outside are at the ends."""
        low, high = self.position(self.low), self.position(self.high)
        at = (self.position(max(value, self.low)) - low) / ((high - low) or 1.0)
        return min(1.0, max(0.0, at))

    def ticks(self, most: int = MAX_TICKS) -> list[Tick]:
        if self.log:
            values = _log_values(self, most)
        else:
            step = _step((self.high - self.low) / most, self.unit)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = [each * step for each in range(first, last + 1)]
        return [Tick(self.place(value), tick_label(value, self.unit)) for value in values]

    def even_values(self, parts: int = 0) -> list[float]:
        """Return the values at both ends and between `parts` equal intervals; without it, at the grid lines."""
        if not parts:
            parts = max(1, round(math.log10(self.high / self.low))) if self.log else PARTS
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return [10 ** (low + (high - low) * part / parts) for part in range(parts + 1)]
        return [self.low + (self.high - self.low) * part / parts for part in range(parts + 1)]


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


def even_axis(values: Iterable[float], unit: str, *, may_log: bool = False) -> FigureAxis:
    """Return an axis that covers `values` and whose equal intervals are round; bytes are round in powers of two.

    If `may_log` and the range is wide, the axis is logarithmic and ends at powers of ten.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if may_log and low > 0 and high / low > MIN_LOG_RATIO:
        return FigureAxis(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)), log=True)
    if unit == "share" and low >= 0 and high <= 1:
        return FigureAxis(0.0, 1.0)
    if 0 <= low < 0.6 * high or 0 < low == high:
        low = 0.0
    least, base = (high - low) / PARTS or abs(high) / PARTS or 0.25, 1024 if "bytes" in unit else 1000
    power = base ** math.floor(math.log(least, base))
    for multiple in (digit * 10**zeros for zeros in range(5) for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        step = multiple * power
        bottom = math.floor(low / step) * step
        if step >= least * 0.999 and bottom + PARTS * step >= high:
            return FigureAxis(bottom, bottom + PARTS * step)
    raise AssertionError("a wide enough step is among them")


def even_labels(axis: FigureAxis, unit: str) -> list[str]:
    """Return the labels of the grid lines of an even axis; with more digits if two would be equal."""
    values = axis.even_values()
    labels = [SHOW[unit](value) for value in values]
    if len({*labels}) == len(labels):
        return labels
    return [f"{value / 2**20:,.1f} MiB" if "bytes" in unit else f"{value:,.5g}" for value in values]


def tick_label(value: float, unit: Unit) -> str:
    """Return a value with its unit, without digits that say nothing: `20 GiB`, `1.5 s`."""
    if unit in ("count", "") and 1000 <= abs(value) < 1e5 and value == round(value):
        return f"{value:,.0f}"
    return re.sub(r"\.0(?=[ %kMBT/]|$)", "", show_value(value, unit)).replace(" 00 s", "")


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
    shapes = []
    for tick in ticks:
        x = percent(tick.at)
        anchor = "start" if tick.at < 0.03 else "end" if tick.at > 0.97 else "middle"
        shapes.append(tag("line", {"class": "tick", "x1": x, "x2": x, "y1": 0, "y2": 5}))
        shapes.append(tag("text", {"x": x, "y": 18, "text-anchor": anchor}, tick.label))
    return tag("svg", {"class": "axis", "width": "100%", "height": AXIS_HEIGHT, "aria-hidden": "true"}, *shapes)


def grid_lines(across: Iterable[float], upwards: Iterable[float]) -> list[Html]:
    lines = [tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 0, "y2": SIZE})
             for x in (round(SIZE * at) for at in across)]  # fmt: skip
    return lines + [tag("line", {"class": "grid", "x1": 0, "x2": SIZE, "y1": y, "y2": y})
                    for y in (round(SIZE * (1 - at)) for at in upwards)]  # fmt: skip


def upright_line(at: float, kind: str, label: str = "") -> Html:
    x = round(SIZE * at)
    title = [tag("title", None, label)] if label else []
    return tag("line", {"class": kind, "x1": x, "x2": x, "y1": 0, "y2": SIZE}, *title)


def curve_shape(points: Sequence[tuple[float, float]], kind: str, *, is_dots: bool) -> Html:
    places = [(round(SIZE * x), round(SIZE * (1 - y))) for x, y in points]
    if is_dots or len(places) == 1:
        # A line of zero length with round caps stays round when the drawing is stretched.
        return Html("".join(tag("line", {"class": f"dot {kind}", "x1": x, "x2": x, "y1": y, "y2": y})
                            for x, y in places))  # fmt: skip
    return tag("polyline", {"class": f"line {kind}", "points": " ".join(f"{x},{y}" for x, y in places)})


def stretched(shapes: Iterable[Html], label: str, *, kind: str | None = None) -> Html:
    """Return shapes in units of `SIZE` as a drawing that fills its place."""
    return tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "class": kind, "role": "img",
                       "aria-label": label}, *shapes)  # fmt: skip


def swatch(kind: str) -> Html:
    square = tag("rect", {"class": f"fill {kind}", "x": 0, "y": 0, "width": 10, "height": 10})
    return tag("svg", {"class": "swatch", "viewBox": "0 0 10 10", "aria-hidden": "true"}, square)


def titled(title: str, *parts: Html, data: str | None = None) -> Html:
    """Return a figure with its title; `data` are the values that `page.js` shows under the pointer."""
    caption = tag("figcaption", None, tag("h3", None, title))
    return tag("figure", {"class": "view", "data-plot": data}, caption, *parts)


def color_kinds(names: Sequence[str], own: Mapping[str, int] | None = None) -> Mapping[str, str]:
    numbers = {name: (own or {}).get(name, number) for number, name in enumerate(names)}
    return {name: KINDS[number % len(KINDS)] for name, number in numbers.items()}


def legend(named: Iterable[tuple[str, str]], limits: Mapping[str, str] | None = None) -> Html:
    items = [tag("li", None, swatch(kind), name) for name, kind in named if name]
    line = tag("line", {"class": "level", "x1": 0, "x2": 18, "y1": 5, "y2": 5})
    dashes = tag("svg", {"class": "dashes", "viewBox": "0 0 18 10", "aria-hidden": "true"}, line)
    items += [tag("li", None, dashes, f"{name} {value}".strip()) for name, value in (limits or {}).items()]
    return tag("ul", {"class": "legend"}, *items) if items else Html("")

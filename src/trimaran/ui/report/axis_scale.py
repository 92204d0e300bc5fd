"""Maps values to plot coordinates, and chooses round numbers for axis ticks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trimaran.core import show_bytes, show_count, show_seconds

SIZE = 1000  # width and height of a plot in its own coordinates; the page stretches it
PARTS = 4  # intervals between grid lines
MIN_LOG_RATIO = 50.0  # of the highest to the lowest value; above it the scale is logarithmic

Show = Callable[[float], str]
SHOW: dict[str, Show] = {
    "number": lambda value: f"{value:.4g}",
    "count": show_count,
    "bytes": show_bytes,
    "bytes/s": lambda value: f"{show_bytes(value)}/s",
    "seconds": show_seconds,
    "share": lambda value: f"{value:.1%}",
    "W": lambda value: f"{value:.0f} W",
    "C": lambda value: f"{value:.0f} °C",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps `low` to 0 and `high` to `SIZE`, logarithmically if `log`."""

    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Return the coordinate of `value`; values outside are clamped."""
        return self.positions([value])[0]

    def positions(self, values: Sequence[float]) -> list[float]:
        """Return the coordinates of `values`."""
        low, high = self._transform(self.low), self._transform(self.high)
        factor = SIZE / ((high - low) or 1.0)
        found = map(math.log10, [max(value, self.low) for value in values]) if self.log else values
        return [min(float(SIZE), max(0.0, (value - low) * factor)) for value in found]

    @property
    def parts(self) -> int:
        """The number of intervals between grid lines: one per power of ten if `log`."""
        return max(1, round(self._transform(self.high) - self._transform(self.low))) if self.log else PARTS

    def ticks(self, parts: int = 0) -> list[float]:
        """Return the values at the grid lines, or at `parts` equal intervals, the lowest first."""
        parts = parts or self.parts
        low, high = self._transform(self.low), self._transform(self.high)
        values = [low + (high - low) * part / parts for part in range(parts + 1)]
        return [10**value for value in values] if self.log else values

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.log else value


def round_scale(values: Iterable[float], *, unit: str, may_log: bool = False) -> Scale:
    """Return a scale that covers `values` and has round ticks; bytes are round in powers of two.

    If `may_log` and the range is wide, the scale is logarithmic and ends at powers of ten.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if may_log and low > 0 and high / low > MIN_LOG_RATIO:
        return Scale(low=10 ** math.floor(math.log10(low)), high=10 ** math.ceil(math.log10(high)), log=True)
    if unit == "share" and low >= 0 and high <= 1:
        return Scale(low=0.0, high=1.0)
    if 0 <= low < 0.6 * high or 0 < low == high:
        low = 0.0
    for step in _round_steps((high - low) / PARTS or abs(high) / PARTS or 0.25, base=1024 if "bytes" in unit else 1000):
        bottom = math.floor(low / step) * step
        if bottom + PARTS * step >= high:
            return Scale(low=bottom, high=bottom + PARTS * step)
    raise AssertionError("a wide enough step is among them")


def tick_labels(scale: Scale, unit: str) -> list[str]:
    """Return the labels of the grid lines, the lowest first; with more digits if two would be equal."""
    ticks = scale.ticks()
    labels = [SHOW[unit](value) for value in ticks]
    if len({*labels}) == len(labels):
        return labels
    return [f"{value / 2**20:,.1f} MiB" if "bytes" in unit else f"{value:,.5g}" for value in ticks]


def _round_steps(least: float, *, base: int) -> list[float]:
    """Return round numbers from about `least` upwards: a few digits times a power of ten, times a power of `base`."""
    power = base ** math.floor(math.log(least, base))
    multiples: Sequence[float] = [digit * 10**zeros for zeros in range(5) for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    return [multiple * power for multiple in multiples if multiple * power >= least * 0.999]

"""How values of figures are written: with their unit, in three digits or so."""

from collections.abc import Callable

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.ui.viz.figures import Unit

TIB = float(1 << 40)


def show_duration(seconds: float) -> str:
    """Return a time from microseconds to days: `35 us`, `1.2 ms`, `4.2 s`, `3 min 05 s`, `2.5 days`."""
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
    if size < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if size >= 172_800:
        return f"{seconds / 86_400:,.3g} days" if size < 8.64e7 else f"{seconds / 86_400:,.0f} days"
    return show_seconds(seconds)


def _bytes(value: float) -> str:
    return f"{value / TIB:,.1f} TiB" if abs(value) >= TIB else show_bytes(value)


SHOW: dict[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "seconds": show_duration,
    "count": lambda value: f"{value:g}" if abs(value) < 1000 else show_count(value),
    "fraction": lambda value: f"{value:.1%}",
    "bytes/second": lambda value: f"{_bytes(value)}/s",
    "currency": lambda value: f"{value:,.0f}",
    "": lambda value: f"{value:g}",
}


def show_value(value: float | None, unit: Unit) -> str:
    """Return the value with its unit; nothing for None."""
    return "" if value is None else SHOW[unit](value)

"""Units, and how to format them."""

from typing import NewType

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)
Flops = NewType("Flops", float)

GIB = 2**30


def show_bytes(num: float) -> str:
    """Return `num` bytes with a binary unit: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num) < 1024:
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} GiB"


def show_count(num: float) -> str:
    """Return a count with a metric suffix: `8.0B` parameters, `12.3k` tokens."""
    for suffix in ("", "k", "M", "B"):
        if abs(num) < 1000:
            return f"{num:.0f}" if suffix == "" else f"{num:.1f}{suffix}"
        num /= 1000
    return f"{num:.1f}T"


def show_seconds(seconds: float) -> str:
    """Return a duration as `12 ms`, `4.2 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"

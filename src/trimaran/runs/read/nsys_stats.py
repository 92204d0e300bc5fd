"""Reads what `nsys stats` says of the NVTX ranges of a recording."""

import csv
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

STEP = re.compile(r"step \d+")
PHASES = ("data", "forward", "backward", "comm", "optimizer", "checkpoint", "evaluation")
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSeconds:
    """A range by its text: how often it was open, the seconds of all, and their share of the steps."""

    text: str
    calls: int
    seconds: float
    share: float

    @property
    def is_phase(self) -> bool:
        return self.text in PHASES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_nsys_stats(text: str) -> list[RangeSeconds]:
    """Return the ranges in the CSV of the report `nvtx_pushpop_sum`, without steps, the longest first.

    Lines around the table are ignored. A range of NVTX's default domain is named `:text`.
    """
    rows = _rows(text.splitlines())
    steps = sum(seconds for name, _, seconds in rows if STEP.fullmatch(name))
    found = [
        RangeSeconds(text=name, calls=calls, seconds=seconds, share=seconds / steps if steps else 0.0)
        for name, calls, seconds in rows
        if not STEP.fullmatch(name)
    ]
    return sorted(found, key=lambda each: -each.seconds)


def _rows(lines: Sequence[str]) -> list[tuple[str, int, float]]:
    """Return the table as text, calls and seconds; empty if there is none."""
    starts = [number for number, line in enumerate(lines) if "Total Time (ns)" in line and "Range" in line]
    if not starts:
        return []
    table = csv.DictReader(lines[starts[0] :])
    return [
        (each["Range"].removeprefix(":"), int(each["Instances"]), float(each["Total Time (ns)"]) / NANOSECONDS)
        for each in table
        if each.get("Range") and each.get("Instances")
    ]

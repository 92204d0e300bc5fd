"""Flattens a line into named scalars for chart libraries."""

import math
from collections.abc import Iterator
from typing import Any

from trimaran.runs.sinks.sink import Line

EXCLUDED_KEYS = {"step", "time", "node", "host"}
MAX_SCALARS_PER_LINE = 512  # each becomes a chart


def scalars(line: Line) -> dict[str, float]:
    """Return the finite numbers of `line`; nested ones are named by their path, such as `memory/allocated`.

    List items with an `index` are named by it, such as `gpus/0/power`; other lists are left out.
    """
    found: dict[str, float] = {}
    for name, value in _walk({key: value for key, value in line.items() if key not in EXCLUDED_KEYS}, ""):
        if len(found) == MAX_SCALARS_PER_LINE:
            break
        found[name] = value
    return found


def _walk(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield path, float(value)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _walk(each, f"{path}/{name}" if path else str(name))
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict) and "index" in each:
                yield from _walk(
                    {key: inner for key, inner in each.items() if key != "index"}, f"{path}/{each['index']}"
                )

"""The numbers of a line, each under a name: for charts that know nothing of Trimaran."""

import math
from collections.abc import Iterator
from typing import Any

from trimaran.telemetry.sinks.sink import Line

NOT_DRAWN = {"step", "time", "node", "host"}
MOST_SCALARS = 512  # of one line; a chart each


def scalars(line: Line) -> dict[str, float]:
    """Return the finite numbers of `line`; what lies deeper is named by its path, such as `memory/allocated`.

    Things in a list are named by their `index` where they have one, such as `gpus/0/power`; other lists are left out.
    """
    found: dict[str, float] = {}
    for name, value in _walk({key: value for key, value in line.items() if key not in NOT_DRAWN}, ""):
        if len(found) == MOST_SCALARS:
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

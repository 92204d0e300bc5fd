"""Many of a kind as few numbers."""

import statistics
from collections.abc import Iterator, Mapping

MOST_OUTLIERS = 3
NOBODY = ""  # a label that is empty is the same as none


def spread(
    values: Mapping[tuple[str, ...], float], *, most: int, width: int
) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """Yield (who, stat, value): each of `values` with an empty stat while they are at most `most`.

    Otherwise min, median and max with `width` empty names, and those that are farthest from the median by name.
    """
    if len(values) <= most:
        yield from ((who, "", value) for who, value in values.items())
        return
    median = statistics.median(values.values())
    nobody = (NOBODY,) * width
    yield from ((nobody, "min", min(values.values())), (nobody, "median", median))
    yield nobody, "max", max(values.values())
    farthest = sorted(values.items(), key=lambda item: (-abs(item[1] - median), item[0]))
    yield from ((who, "", value) for who, value in farthest[:MOST_OUTLIERS])

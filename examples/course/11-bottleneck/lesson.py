"""Which phase makes steps long, and how often: python examples/course/11-bottleneck/lesson.py RUN"""

import json
import sys
from pathlib import Path
from statistics import median

WARM_UP = 5  # steps that are not looked at


def split(steps, period, first):
    """Return the steps of a period, and all others."""
    chosen = [each for each in steps if each["step"] % period == first]
    return chosen, [each for each in steps if each["step"] % period != first]


def excess(steps, period, first):
    """Return by how many seconds the median step of a period is longer than the median of the others."""
    chosen, others = split(steps, period, first)
    return median(each["step_seconds"] for each in chosen) - median(each["step_seconds"] for each in others)


def main():
    lines = (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["step"] > WARM_UP]
    periods = range(2, len(steps) // 3)  # at least three long steps
    period, first = max(((period, first) for period in periods for first in range(period)),
                        key=lambda each: excess(steps, *each))  # fmt: skip
    long, others = split(steps, period, first)
    print(f"every {period} steps one is long: {', '.join(str(each['step']) for each in long)}")
    print("median milliseconds   long steps  others")
    names = [name for name in steps[0]["phases"] if any(each["phases"][name] for each in steps)]
    rows = {name: [1e3 * median(each["phases"][name] for each in part) for part in (long, others)] for name in names}
    for name, (here, there) in rows.items():
        print(f"{name:22}  {here:9.1f}  {there:6.1f}")
    print("the phase that is longer:", max(rows, key=lambda name: rows[name][0] - rows[name][1]))


if __name__ == "__main__":
    main()

"""Which phase makes steps long, and how often: python examples/course/11-bottleneck/lesson.py RUN"""

import json
import sys
from pathlib import Path
from statistics import median

WARM_UP = 5  # steps that are not looked at


def split(steps, phase, period, first):
    """Return the seconds of a phase in the steps of a period, and in all others."""
    chosen = [each["phases"][phase] for each in steps if each["step"] % period == first]
    return chosen, [each["phases"][phase] for each in steps if each["step"] % period != first]


def contrast(steps, phase, period, first):
    """Return how far the shortest phase of a period is above the others, in units of their own deviation.

    A busy machine makes single steps long in any phase; the shortest of a period is long only if all are.
    """
    chosen, others = split(steps, phase, period, first)
    usual = median(others)
    deviation = median(abs(each - usual) for each in others) + 1e-3  # seconds
    return (min(chosen) - usual) / deviation if len(chosen) >= 3 else 0.0


def main():
    lines = (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["step"] > WARM_UP]
    phases = list(steps[0]["phases"])
    candidates = [(phase, period, first) for phase in phases for period in range(2, 20) for first in range(period)]
    phase, period, first = max(candidates, key=lambda each: contrast(steps, *each))
    numbers = [str(each["step"]) for each in steps if each["step"] % period == first]
    print(f"every {period} steps {phase} is long: {', '.join(numbers)}")
    print("median milliseconds  in these steps  in others")
    for name in phases:
        here, there = (1e3 * median(part) for part in split(steps, name, period, first))
        print(f"{name:20} {here:10.1f} {there:10.1f}")


if __name__ == "__main__":
    main()

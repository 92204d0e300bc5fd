"""Sums of neighbouring steps: what a ledger and a curve need of them, however many they are."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from trimaran.core import PHASES
from trimaran.telemetry.step_lines import StepLine, read_waits

Point = tuple[float, float]
"""A position, such as a step, and a value."""

STEP_CATEGORIES = ("compute", "communication", "data", "straggler", "save")
MAX_NOT_FINITE = 50  # steps with NaN or Inf that a block lists

SCALARS: dict[str, Callable[[Any], float]] = {
    "loss": lambda step: step.loss,
    "grad_norm": lambda step: step.grad_norm,
    "lr": lambda step: step.lr,
    "tokens_per_second": lambda step: step.tokens / step.step_seconds if step.step_seconds > 0 else math.nan,
    "step_seconds": lambda step: step.step_seconds,
    "peak_bytes": lambda step: float(step.peak_bytes),
}
"""Of a `StepLine` or a `StepMetrics`."""


class Extent(NamedTuple):
    """The finite values of a scalar over some steps: their number and sum, and four of the points."""

    count: int
    total: float
    first: Point
    last: Point
    least: Point
    most: Point

    def join(self, later: "Extent") -> "Extent":
        least = self.least if self.least[1] <= later.least[1] else later.least
        most = self.most if self.most[1] >= later.most[1] else later.most
        return Extent(self.count + later.count, self.total + later.total, self.first, later.last, least, most)


def join_extents(extents: Sequence[Extent]) -> Extent:
    """Return the extent of all `extents`, which are in order; there is at least one."""
    if len(extents) == 1:
        return extents[0]
    least, most = min([each.least[1] for each in extents]), max([each.most[1] for each in extents])
    return Extent(
        sum([each.count for each in extents]),
        math.fsum([each.total for each in extents]),
        extents[0].first,
        extents[-1].last,
        next(each.least for each in extents if each.least[1] == least),
        next(each.most for each in extents if each.most[1] == most),
    )


def extent_of(points: Sequence[Point]) -> Extent | None:
    """Return the extent of points in order; None if none is finite."""
    finite = [point for point in points if -math.inf < point[1] < math.inf]
    if not finite:
        return None
    values = [value for _, value in finite]
    least, most = values.index(min(values)), values.index(max(values))
    return Extent(len(finite), math.fsum(values), finite[0], finite[-1], finite[least], finite[most])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """The sums of `count` steps, from step `first` to step `last`.

    `seconds` are those of `STEP_CATEGORIES` over the steps with finite times, of which `highest` is the highest step
    and `time` the latest time. `phases` are sums of seconds. `scalars` has the extent of each of `SCALARS`.
    """

    first: int
    last: int
    count: int
    highest: int
    time: float
    seconds: tuple[float, ...]
    phases: dict[str, float]
    scalars: dict[str, Extent]
    not_finite: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the block as JSON for `read_block`."""
        extents = {name: [each.count, each.total, *each.first, *each.last, *each.least, *each.most]
                   for name, each in self.scalars.items()}  # fmt: skip
        return {
            "steps": [self.first, self.last, self.count, self.highest],
            "time": self.time,
            "seconds": [round(each, 6) for each in self.seconds],
            "phases": [round(self.phases.get(name, 0.0), 6) for name in PHASES],
            "scalars": extents,
            "not_finite": list(self.not_finite),
        }

    def join(self, later: Self) -> "StepBlock":
        """Return the block of these steps and the `later` ones."""
        scalars = dict(self.scalars)
        for name, extent in later.scalars.items():
            scalars[name] = scalars[name].join(extent) if name in scalars else extent
        return StepBlock(
            first=self.first,
            last=later.last,
            count=self.count + later.count,
            highest=max(self.highest, later.highest),
            time=max(self.time, later.time),
            seconds=tuple(mine + theirs for mine, theirs in zip(self.seconds, later.seconds, strict=True)),
            phases={name: self.phases.get(name, 0.0) + later.phases.get(name, 0.0) for name in PHASES},
            scalars=scalars,
            not_finite=(*self.not_finite, *later.not_finite)[:MAX_NOT_FINITE],
        )


def block_of(steps: Sequence[StepLine]) -> StepBlock:
    """Return the block of `steps`, of which there is at least one."""
    splits = [(step, split_step(step)) for step in steps]
    timed = [(step, parts) for step, parts in splits if math.isfinite(sum(parts))]
    return StepBlock(
        first=steps[0].step,
        last=steps[-1].step,
        count=len(steps),
        highest=max((step.step for step, _ in timed), default=0),
        time=max((step.time for step, _ in timed), default=0.0),
        seconds=tuple(math.fsum(parts[index] for _, parts in timed) for index in range(len(STEP_CATEGORIES))),
        phases={name: math.fsum(step.phases.get(name, 0.0) for step in steps) for name in PHASES},
        scalars={
            name: extent
            for name, value in SCALARS.items()
            if (extent := extent_of([(step.step, value(step)) for step in steps])) is not None
        },
        not_finite=tuple(each.step for each in steps if not_finite(each))[:MAX_NOT_FINITE],
    )


def estimated_block(sample: Sequence[StepLine], last: int) -> StepBlock:
    """Return the block of the steps from the first of `sample` to `last`, with sums as if all were like the sample."""
    found = block_of(sample)
    count = max(found.count, last - found.first + 1)
    factor = count / found.count
    return replace(
        found,
        last=max(last, found.last),
        count=count,
        highest=max(last, found.highest),
        seconds=tuple(factor * each for each in found.seconds),
        phases={name: factor * each for name, each in found.phases.items()},
        scalars={
            name: each._replace(count=round(factor * each.count), total=factor * each.total)
            for name, each in found.scalars.items()
        },
    )


def read_block(tree: Mapping[str, Any]) -> StepBlock:
    """Return the block of `StepBlock.as_dict`. Raises KeyError, ValueError or TypeError if it is of another version."""
    first, last, count, highest = tree["steps"]
    scalars = {
        name: Extent(finite, total, (a, first_value), (b, last_value), (c, least), (d, most))
        for name, (finite, total, a, first_value, b, last_value, c, least, d, most) in tree["scalars"].items()
    }
    seconds = tuple(tree["seconds"])
    if len(seconds) != len(STEP_CATEGORIES) or not scalars.keys() <= SCALARS.keys():
        raise ValueError("not the sums of this version")
    return StepBlock(
        first=first,
        last=last,
        count=count,
        highest=highest,
        time=tree["time"],
        seconds=seconds,
        phases=dict(zip(PHASES, tree["phases"], strict=True)),
        scalars=scalars,
        not_finite=tuple(tree["not_finite"]),
    )


def not_finite(step: Any) -> bool:
    """Whether the loss or the gradient norm of a step is NaN or Inf."""
    return not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))


def split_step(step: StepLine) -> tuple[float, float, float, float, float]:
    """Return the seconds of a step in the order of `STEP_CATEGORIES`; they add up to `step_seconds`."""
    phases, total = step.phases, step.step_seconds
    if not total > 0:
        total = sum(phases.values())
    data, save = phases.get("data", 0.0), phases.get("checkpoint", 0.0)
    left = max(0.0, total - data - save)
    comm, straggler = read_waits(step.rest)
    straggler = min(left, straggler)
    # A rank waits for others inside a collective, in whichever phase that is.
    communication = min(left, max(phases.get("comm", 0.0), comm + straggler)) - straggler
    return left - straggler - communication, communication, data, straggler, save

"""Measured collectives by size, group and backend: the value, its file, and the bandwidths of nccl-tests.

A line through the times of a collective gives the latency and the bandwidth of a link.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import DEVICE_TRAITS, MAD_TO_SIGMA, UserError, read_regular_bytes
from trimaran.machine.calibration import first_error

MAX_FILE_BYTES = 1 << 24
VERSION = 1

# Bytes that cross the link of a rank, per byte of the message, as nccl-tests counts them (doc/PERFORMANCE.md there).
# The message is the whole buffer: what an all-gather returns, what a reduce-scatter or an all-to-all is given.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "send_recv": lambda ranks: 1.0,
}
# Rounds on a ring, each of as many hops as there are other ranks; collectives that are not here have one hop.
NUM_ROUNDS_ON_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Text = Annotated[str, Field(max_length=4096)]
Shape = ConfigDict(frozen=True, extra="ignore")  # a file also has what follows from these fields


NUM_ROUNDS = 50  # of reweighting; a few are enough, and the last ones change nothing
CHANGE_TO_STOP = 1e-12
TUKEY_LIMIT = 4.685  # in sigmas: beyond it a point has no weight; 95 % efficient where there are no outliers
MIN_SIGMA = 1e-3  # relative: a clock and a mean of rounds are no better than this
MIN_POINTS = 3

Point = tuple[float, float]  # bytes that cross the link, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Seconds of a message of S bytes: `alpha_seconds` + S / `bytes_per_second`. Errors are one standard error."""

    alpha_seconds: float
    alpha_error_seconds: float
    bytes_per_second: float
    bandwidth_error: float  # relative
    residual: float  # the median relative distance of the points from the line
    outliers: tuple[float, ...] = ()  # sizes of the points that were left out: the line does not describe them

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_seconds + num_bytes / self.bytes_per_second


def fit_link(points: Sequence[Point]) -> LinkFit | None:
    """Return the line through `points`; None with fewer than three sizes, or if larger messages take no longer.

    Residuals are relative to the measured time, as sizes span many powers of ten. The first line minimises the sum of
    their absolute values, so that a few wrong points do not move it. From there, Tukey's biweight gives points weights
    from 1 near the line to 0 far from it, and the error follows from the weighted points that are left.
    """
    if len({size for size, _ in points}) < MIN_POINTS or any(seconds <= 0 for _, seconds in points):
        return None
    line = _least_absolute(points)
    weights = [1.0] * len(points)
    for _ in range(NUM_ROUNDS):
        residuals = [_residual(line, point) for point in points]
        sigma = max(MAD_TO_SIGMA * statistics.median(map(abs, residuals)), MIN_SIGMA)
        weights = [max(0.0, 1 - (residual / (TUKEY_LIMIT * sigma)) ** 2) ** 2 for residual in residuals]
        if sum(weight > 0 for weight in weights) < MIN_POINTS:
            break
        moved = _weighted(points, weights)
        if max(abs(new - old) for new, old in zip(moved, line, strict=True)) <= CHANGE_TO_STOP * max(map(abs, line)):
            break
        line = moved
    alpha, beta = line
    if beta <= 0:
        return None
    alpha_error, beta_error = _errors(points, weights, line)
    return LinkFit(
        alpha_seconds=alpha,
        alpha_error_seconds=alpha_error,
        bytes_per_second=1 / beta,
        bandwidth_error=beta_error / beta,
        residual=statistics.median(abs(_residual(line, point)) for point in points),
        outliers=tuple(size for (size, _), weight in zip(points, weights, strict=True) if weight == 0),
    )


def _residual(line: Point, point: Point) -> float:
    return (line[0] + line[1] * point[0]) / point[1] - 1


def _least_absolute(points: Sequence[Point]) -> Point:
    """Return the line with the least sum of absolute relative residuals. It passes through two of the points."""
    best, line = math.inf, (0.0, 0.0)
    for index, (left, left_seconds) in enumerate(points):
        for right, right_seconds in points[index + 1 :]:
            if left == right:
                continue
            beta = (right_seconds - left_seconds) / (right - left)
            each = (max(left_seconds - beta * left, 0.0), max(beta, 0.0))
            total = math.fsum(abs(_residual(each, point)) for point in points)
            if total < best:
                best, line = total, each
    return line


def _weighted(points: Sequence[Point], weights: Sequence[float]) -> Point:
    a, b, c, p, q = _moments(points, weights)
    determinant = a * c - b * b
    if determinant <= 0:
        return (p / a, 0.0) if a else (0.0, 0.0)
    alpha, beta = (c * p - b * q) / determinant, (a * q - b * p) / determinant
    if alpha < 0:
        return 0.0, q / c
    return (alpha, beta) if beta >= 0 else (p / a, 0.0)


def _errors(points: Sequence[Point], weights: Sequence[float], line: Point) -> Point:
    """Return one standard error of latency and slope, from the weighted residuals; infinite with too few points."""
    a, b, c, _, _ = _moments(points, weights)
    determinant, free = a * c - b * b, sum(weight > 0 for weight in weights) - 2
    if determinant <= 0 or free < 1:
        return math.inf, math.inf
    squares = math.fsum(weight * _residual(line, point) ** 2 for point, weight in zip(points, weights, strict=True))
    variance = max(squares / free, MIN_SIGMA**2)
    return math.sqrt(variance * c / determinant), math.sqrt(variance * a / determinant)


def _moments(points: Sequence[Point], weights: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Return the sums of 1/t^2, S/t^2, S^2/t^2, 1/t and S/t: those of the normal equations."""
    triples = [(weight, size, seconds) for (size, seconds), weight in zip(points, weights, strict=True)]
    return (
        math.fsum(weight / seconds**2 for weight, _, seconds in triples),
        math.fsum(weight * size / seconds**2 for weight, size, seconds in triples),
        math.fsum(weight * size**2 / seconds**2 for weight, size, seconds in triples),
        math.fsum(weight / seconds for weight, _, seconds in triples),
        math.fsum(weight * size / seconds for weight, size, seconds in triples),
    )


class CommPoint(BaseModel):
    """A message size and the seconds of the collective; of a CPU the fastest round, of a GPU the median."""

    model_config = Shape

    num_bytes: Annotated[int, Field(ge=1, le=1 << 45)]
    seconds: Positive
    median_seconds: Positive
    max_seconds: Positive
    rounds: Count


class CommCurve(BaseModel):
    """One collective in one kind of group: `groups` groups of `ranks` ranks each worked at the same time.

    `nodes` is how many nodes a group spans. `link` is what connects its ranks: its bandwidth in the catalogue or the
    cluster's files, and the bus bandwidth that the planner expects of this collective on it.
    """

    model_config = Shape

    group: Text
    collective: Text
    ranks: Count
    nodes: Count
    groups: Count
    points: Annotated[tuple[CommPoint, ...], Field(min_length=1, max_length=64)]
    link: Text = ""
    link_gb_per_second: Positive | None = None
    planned_gb_per_second: Positive | None = None

    @property
    def bus_factor(self) -> float:
        return BUS_FACTORS[self.collective](self.ranks)

    def algorithm_bandwidth(self, point: CommPoint) -> float:
        """Bytes of the message a second."""
        return point.num_bytes / point.seconds

    def bus_bandwidth(self, point: CommPoint) -> float:
        """Bytes a second on the link of a rank."""
        return self.bus_factor * self.algorithm_bandwidth(point)

    @property
    def best_bus_bandwidth(self) -> float:
        return max(map(self.bus_bandwidth, self.points))

    def fit(self) -> LinkFit | None:
        """Return latency and bus bandwidth of the collective."""
        return fit_link([(self.bus_factor * point.num_bytes, point.seconds) for point in self.points])

    @property
    def num_hops(self) -> int:
        """Messages that follow each other: the latency of the collective has this many hops."""
        rounds = NUM_ROUNDS_ON_RING.get(self.collective)
        return rounds * (self.ranks - 1) if rounds else 1


class CommPair(BaseModel):
    """Two ranks that sent each other a message at the same time, and the seconds of the fastest round."""

    model_config = Shape

    ranks: tuple[int, int]
    nodes: Count
    num_bytes: Count
    seconds: Positive


class CommResult(BaseModel):
    """What `trimaran bench comm` measured."""

    model_config = Shape

    version: int = VERSION
    date: Text = ""
    device: Text
    backend: Text
    dtype: Text
    world_size: Count
    num_nodes: Count
    hosts: Annotated[tuple[Text, ...], Field(max_length=1 << 20)] = ()
    torch: Text = ""
    nccl: Text = ""
    environment: Annotated[dict[str, Text], Field(max_length=512)] = {}  # variables that NCCL and gloo read
    curves: Annotated[tuple[CommCurve, ...], Field(min_length=1, max_length=1024)]
    pairs: tuple[CommPair, ...] = ()
    skipped: tuple[dict[str, Any], ...] = ()  # sizes that would have taken too long
    wrong: tuple[dict[str, Any], ...] = ()  # counts of values that a collective got wrong

    def find(self, group: str, collective: str) -> CommCurve | None:
        return next((each for each in self.curves if (each.group, each.collective) == (group, collective)), None)


def make_points(measured: Sequence[Mapping[str, Any]], *, kind: str) -> tuple[CommPoint, ...]:
    """Return the points of a curve from the seconds of each round."""
    points = []
    for each in measured:
        rounds = each["rounds"]
        middle = statistics.median(rounds)
        seconds = min(rounds) if DEVICE_TRAITS[kind].shares_cores else middle
        points.append(CommPoint(num_bytes=each["bytes"], seconds=seconds, median_seconds=middle,
                                max_seconds=max(rounds), rounds=len(rounds)))  # fmt: skip
    return tuple(points)


def read_comm_result(path: Path) -> CommResult:
    """Return the result in the file; raise UserError if it is missing or not one."""
    fix = "write one with `trimaran bench comm --out FILE`"
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        tree = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C011.result-cannot-read", where=str(path), reason=error.strerror) from None
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict) or "curves" not in tree:
        raise UserError("C011.not-result-trimaran", where=str(path))
    try:
        result = CommResult.model_validate(tree)
    except ValidationError as error:
        raise first_error(error, CommResult, code="C011", where=str(path)) from None
    unknown = sorted({each.collective for each in result.curves} - BUS_FACTORS.keys())
    if unknown or any(each.ranks < 2 for each in result.curves):
        what = f"'{unknown[0]}' is not a collective" if unknown else "a group has one rank"
        raise UserError("C011", what, where=str(path), fix=fix)
    return result

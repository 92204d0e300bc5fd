"""Fits the latency and the bandwidth of a link to the times of messages of several sizes."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.core.measured_speed import MAD_TO_SIGMA

NUM_ROUNDS = 50  # of reweighting; a few are enough, and the last ones change nothing
CHANGE_TO_STOP = 1e-12
TUKEY_LIMIT = 4.685  # in sigmas: beyond it a point has no weight; 95 % efficient where there are no outliers
MIN_SIGMA = 1e-3  # relative: a clock and a mean of rounds are no better than this
MIN_POINTS = 3

Point = tuple[float, float]  # bytes that cross the link, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Seconds of a message of S bytes: `alpha_seconds` + S / `bytes_per_second`.

    The errors are one standard error of the estimate. `residual` is the median relative distance of the points from
    the line. `outliers` are the sizes of the points that were left out: the line does not describe them.
    """

    alpha_seconds: float
    alpha_error_seconds: float
    bytes_per_second: float
    bandwidth_error: float  # relative
    residual: float
    outliers: tuple[float, ...] = ()

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
    """Return the weighted least squares line of relative residuals, with no negative latency or slope."""
    a, b, c, p, q = _moments(points, weights)
    determinant = a * c - b * b
    if determinant <= 0:
        return (p / a, 0.0) if a else (0.0, 0.0)
    alpha, beta = (c * p - b * q) / determinant, (a * q - b * p) / determinant
    if alpha < 0:
        return 0.0, q / c
    return (alpha, beta) if beta >= 0 else (p / a, 0.0)


def _errors(points: Sequence[Point], weights: Sequence[float], line: Point) -> Point:
    """Return one standard error of latency and slope, from the weighted residuals."""
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

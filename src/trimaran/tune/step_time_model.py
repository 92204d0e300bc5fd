"""Expected step times of plans that were not measured: predictions, corrected by the plans that were.

The correction is a Gaussian process over the logarithm of measured to predicted. Part of its variance is common to all
plans (the device is faster than assumed), the rest to similar plans only, so a neighbour of a measured plan is known
better than a plan on another mesh. Its scale is that of the prediction's error bar, adapted to the errors found.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from trimaran.core import Plan
from trimaran.tune.trial_record import TriedCandidate, TuneCandidate

COMMON_FRACTION = 0.7  # of the variance of an error that all plans of a cluster share
LENGTH = 1.5  # distance at which errors of plans have little in common beyond that
PRIOR_TRIALS = 4.0  # trials that the error bar counts as much as
DEFAULT_ERROR = 0.3  # if nothing is predicted
NOISES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
# How far plans are from each other if one setting differs, or differs by a factor of two.
MESH_DISTANCE, MICRO_BATCH_DISTANCE, BUCKET_DISTANCE, PREFETCH_DISTANCE = 1.0, 0.35, 0.1, 0.1
SETTING_DISTANCES = {"sharding": 0.7, "recompute": 0.5, "offload": 1.0, "compile": 1.0, "cuda_graphs": 0.7, "loss": 0.3,
                     "towers": 0.5}  # fmt: skip
COMM_DISTANCES = {"overlap": 0.3, "reshard": 0.5, "context": 0.4, "regather": 0.4}
SCHEDULE_DISTANCE, WORKERS_DISTANCE = 0.5, 0.2


class ExpectedTime(NamedTuple):
    """The expected step time in seconds, and the standard deviation of its logarithm."""

    seconds: float
    sigma: float


def distance(one: TuneCandidate, other: TuneCandidate) -> float:
    """Return how different two candidates are; 0 for equal ones."""
    a, b = one.plan, other.plan
    # The data ranks of two sharding stages are in different axes, so together they count once.
    mesh = sum(_doublings(getattr(a.mesh, axis), getattr(b.mesh, axis)) for axis in ("dp", "tp", "pp", "cp", "ep"))
    mesh += 0.5 * _doublings(a.mesh.dp_shard, b.mesh.dp_shard) if a.sharding == b.sharding else 0.0
    total = MESH_DISTANCE * mesh + MICRO_BATCH_DISTANCE * _doublings(a.micro_batch, b.micro_batch)
    total += sum(far for name, far in SETTING_DISTANCES.items() if getattr(a, name) != getattr(b, name))
    total += sum(far for name, far in COMM_DISTANCES.items() if getattr(a.comm, name) != getattr(b.comm, name))
    total += BUCKET_DISTANCE * _doublings(a.comm.bucket_mb, b.comm.bucket_mb)
    total += PREFETCH_DISTANCE * abs(a.comm.prefetch - b.comm.prefetch)
    if a.mesh.pp > 1 and a.pipeline != b.pipeline:
        total += SCHEDULE_DISTANCE
    return total + (WORKERS_DISTANCE if one.workers != other.workers else 0.0)


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(one / other))


class StepTimeModel:
    """What measured candidates say about others. `noise` is the relative error of single trials, beyond their own.

    Trials of one plan differ by more than their steps do if the machine is shared. The noise is the most likely one of
    `NOISES`: large if similar plans contradict each other.
    """

    def __init__(self, tried: Sequence[TriedCandidate]) -> None:
        self._tried = [each for each in tried if each.seconds is not None]
        logs = [math.log(each.seconds or 1.0) for each in self._tried]
        self._usual = math.exp(fmean(logs)) if logs else 1.0
        self._residuals = np.array([log - math.log(self._base(each.candidate))
                                    for log, each in zip(logs, self._tried, strict=True)])  # fmt: skip
        self._variance = max((error_of(each.candidate.plan) for each in self._tried), default=DEFAULT_ERROR) ** 2
        count = len(self._tried)
        self._kernel = self._variance * np.array(
            [[_correlation(a.candidate, b.candidate) for b in self._tried] for a in self._tried]
        ).reshape(count, count)
        self.noise = max(NOISES, key=self._likelihood) if count > 1 else NOISES[0]
        self._inverse = np.linalg.inv(self._kernel + self._errors(self.noise))
        self._weights = self._inverse @ self._residuals
        # Errors that are smaller, or larger, than the error bar says make it smaller, or larger, for all plans.
        self._scale = (PRIOR_TRIALS + float(self._residuals @ self._weights)) / (PRIOR_TRIALS + count)

    def expect(self, candidate: TuneCandidate) -> ExpectedTime:
        """Return the expected step time of a candidate, measured or not."""
        if not self._tried:
            return ExpectedTime(self._base(candidate), error_of(candidate.plan))
        near = self._variance * np.array([_correlation(candidate, each.candidate) for each in self._tried])
        # Plans that differ little and contradict each other must not be extrapolated beyond what was ever seen.
        mean = min(max(float(near @ self._weights), self._residuals.min()), self._residuals.max())
        variance = max(1e-8, (self._variance - float(near @ self._inverse @ near)) * self._scale)
        return ExpectedTime(self._base(candidate) * math.exp(mean), math.sqrt(variance))

    def _base(self, candidate: TuneCandidate) -> float:
        """Return the predicted time; if nothing is predicted, the usual one of those that were measured."""
        return candidate.predicted_seconds or self._usual

    def _errors(self, noise: float) -> np.ndarray:
        return np.diag([each.sigma**2 + noise**2 / each.num_trials for each in self._tried])

    def _likelihood(self, noise: float) -> float:
        """Return the logarithm of how likely the measurements are with such a noise, up to a constant."""
        kernel = self._kernel + self._errors(noise)
        _, volume = np.linalg.slogdet(kernel)
        fit = float(self._residuals @ np.linalg.solve(kernel, self._residuals))
        count = PRIOR_TRIALS + len(self._tried)
        return -0.5 * (count * math.log(PRIOR_TRIALS + fit) + float(volume)) - 0.5 * math.log(noise)


def error_of(plan: Plan) -> float:
    return plan.prediction.error if plan.prediction else DEFAULT_ERROR


def _correlation(one: TuneCandidate, other: TuneCandidate) -> float:
    return COMMON_FRACTION + (1 - COMMON_FRACTION) * math.exp(-((distance(one, other) / LENGTH) ** 2))


def expected_gain(best_seconds: float, expected: ExpectedTime) -> float:
    """Return by how much of `best_seconds` a trial is expected to improve on it: 0 if it is certain not to."""
    ahead = math.log(best_seconds / expected.seconds)
    ratio = ahead / expected.sigma
    below = 0.5 * math.erfc(-ratio / math.sqrt(2))
    density = math.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
    return max(0.0, expected.sigma * (ratio * below + density))

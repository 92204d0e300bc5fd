"""Expected step times of plans that were not measured: predictions, corrected by the plans that were.

The correction is a Gaussian process over the logarithm of measured to predicted. Part of its variance is common to all
plans (the device is faster than assumed), a part to plans with the same kernels, the rest to plans of similar sizes. So
a neighbour of a measured plan is known better than a plan on another mesh. The scale is that of the prediction's error
bar, adapted to the errors that were found.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from trimaran.core import Plan
from trimaran.planner.measure.trial_record import TriedCandidate, TuneCandidate

# Of the variance of an error: what all plans of a cluster share, what plans with the same kernels share, and the rest,
# which only plans of similar sizes share.
COMMON_FRACTION, KERNEL_FRACTION = 0.6, 0.15
SAME_KERNELS = 0.7  # correlation of that part for each choice of kernels that differs
LENGTH = 1.5  # distance at which sizes have little in common
PRIOR_TRIALS = 4.0  # trials that the error bar counts as much as
MAX_SCALE = 2.0  # of the variance: one plan that is far slower than predicted says little about others
DEFAULT_ERROR = 0.3  # if nothing is predicted
NOISES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
USUAL_NOISE, NOISE_SPREAD = 0.01, 3.0  # of an idle machine, and the factor by which another one usually differs
# How far apart plans are if one of them has twice as much.
MESH_DISTANCE, SHARDS_DISTANCE, MICRO_BATCH_DISTANCE, BUCKET_DISTANCE, PREFETCH_DISTANCE = 1.0, 0.5, 0.35, 0.1, 0.1
KERNEL_CHOICES = ("sharding", "recompute", "offload", "compile", "cuda_graphs", "loss")
COMM_CHOICES = ("overlap", "reshard", "context", "regather")


class ExpectedTime(NamedTuple):
    """The expected step time in seconds, and the standard deviation of its logarithm."""

    seconds: float
    sigma: float


class PlanFeatures(NamedTuple):
    """What the errors of plans depend on: their sizes, scaled by what differences matter, and their kernels."""

    sizes: tuple[float, ...]
    kernels: tuple[object, ...]


def features_of(candidate: TuneCandidate) -> PlanFeatures:
    """Return the features of a candidate."""
    plan, mesh, comm = candidate.plan, candidate.plan.mesh, candidate.plan.comm
    axes = (MESH_DISTANCE * math.log2(each) for each in (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep))
    sizes = (
        *axes,
        SHARDS_DISTANCE * math.log2(mesh.dp_shard),
        MICRO_BATCH_DISTANCE * math.log2(plan.micro_batch),
        BUCKET_DISTANCE * math.log2(comm.bucket_mb),
        PREFETCH_DISTANCE * comm.prefetch,
    )
    kernels = (
        *(getattr(plan, name) for name in KERNEL_CHOICES),
        *(getattr(comm, name) for name in COMM_CHOICES),
        (plan.pipeline.schedule, plan.pipeline.stages),
        candidate.workers,
    )
    return PlanFeatures(sizes, kernels)


def correlation(one: PlanFeatures, other: PlanFeatures) -> float:
    """Return how much the errors of two plans have in common: 1 for equal plans."""
    num_other = sum(a != b for a, b in zip(one.kernels, other.kernels, strict=True))
    near = math.exp(-((math.dist(one.sizes, other.sizes) / LENGTH) ** 2))
    sizes = 1 - COMMON_FRACTION - KERNEL_FRACTION
    return COMMON_FRACTION + KERNEL_FRACTION * SAME_KERNELS**num_other + sizes * near


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
        self._features = [features_of(each.candidate) for each in self._tried]
        common = np.array([[correlation(a, b) for b in self._features] for a in self._features])
        self._kernel = self._variance * common.reshape(count, count)
        self.noise = max(NOISES, key=self._likelihood) if count > 1 else NOISES[0]
        self._inverse = np.linalg.inv(self._kernel + self._errors(self.noise))
        self._weights = self._inverse @ self._residuals
        # Errors that are smaller, or larger, than the error bar says make it smaller, or larger, for all plans.
        scale = (PRIOR_TRIALS + float(self._residuals @ self._weights)) / (PRIOR_TRIALS + count)
        self._scale = min(scale, MAX_SCALE)

    def expect(self, candidate: TuneCandidate) -> ExpectedTime:
        """Return the expected step time of a candidate, measured or not."""
        if not self._tried:
            return ExpectedTime(self._base(candidate), error_of(candidate.plan))
        own = features_of(candidate)
        near = self._variance * np.array([correlation(own, each) for each in self._features])
        # Plans that differ little and contradict each other must not be extrapolated beyond what was ever seen.
        least, most = min(0.0, self._residuals.min()), max(0.0, self._residuals.max())
        mean = min(max(float(near @ self._weights), least), most)
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
        count, unusual = PRIOR_TRIALS + len(self._tried), math.log(noise / USUAL_NOISE, NOISE_SPREAD)
        return -0.5 * (count * math.log(PRIOR_TRIALS + fit) + float(volume)) - 0.5 * unusual**2


def error_of(plan: Plan) -> float:
    return plan.prediction.error if plan.prediction else DEFAULT_ERROR


def expected_gain(best_seconds: float, expected: ExpectedTime) -> float:
    """Return by how much of `best_seconds` a trial is expected to improve on it: 0 if it is certain not to."""
    ahead = math.log(best_seconds / expected.seconds)
    ratio = ahead / expected.sigma
    below = 0.5 * math.erfc(-ratio / math.sqrt(2))
    density = math.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
    return max(0.0, expected.sigma * (ratio * below + density))

"""The spread of measurements, from medians: a few outliers do not move it."""

import math
from collections.abc import Sequence
from statistics import median

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
STANDARD_ERROR_OF_MEDIAN = 1.2533  # relative to that of the mean


def robust_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation of `values`, of which there is at least one."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(each - middle) for each in values)


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of `values`, of which there is at least one."""
    return STANDARD_ERROR_OF_MEDIAN * robust_sigma(values) / math.sqrt(len(values))

"""The spread of measurements, from medians."""

import random
from statistics import NormalDist

import pytest

from trimaran.core.measured_speed import median_error, robust_sigma

VALUES = NormalDist(5.0, 2.0).samples(4000, seed=1)


def test_a_tenth_of_outliers_hardly_changes_the_deviation() -> None:
    assert robust_sigma(VALUES) == pytest.approx(2.0, rel=0.05)
    assert robust_sigma([*VALUES, *[1e6] * 400]) == pytest.approx(2.0, rel=0.2)


def test_the_error_of_a_median_is_how_much_medians_of_samples_differ() -> None:
    draw = random.Random(2)
    medians = [sorted(draw.sample(VALUES, 101))[50] for _ in range(600)]
    assert robust_sigma(medians) == pytest.approx(median_error(VALUES[:101]), rel=0.3)


def test_equal_values_have_no_spread() -> None:
    assert robust_sigma([3.0]) == robust_sigma([3.0, 3.0]) == median_error([3.0]) == 0.0

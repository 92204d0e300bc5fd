"""Latency and bandwidth are recovered from the times of messages, with noise, outliers and bends."""

import math
import random
import statistics

import pytest

from trimaran.machine import fit_link

SIZES = [2**power for power in range(10, 29)]
LINKS = {"NVLink": (12e-6, 400e9), "InfiniBand": (30e-6, 40e9), "gloo": (3e-4, 1.3e9), "100 Mbit/s": (20e-3, 12.5e6)}


def times(alpha: float, bandwidth: float, *, noise: float = 0.0, seed: int = 0) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(size, (alpha + size / bandwidth) * math.exp(draw.gauss(0, noise))) for size in SIZES]


@pytest.mark.parametrize("name", LINKS)
def test_exact_times_give_the_link_back(name: str) -> None:
    alpha, bandwidth = LINKS[name]
    fit = fit_link(times(alpha, bandwidth))
    assert fit is not None
    assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-6)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fit.residual < 1e-9
    assert fit.outliers == ()


@pytest.mark.parametrize("name", LINKS)
def test_noise_of_five_percent_moves_the_link_by_less_than_ten(name: str) -> None:
    alpha, bandwidth = LINKS[name]
    for seed in range(20):
        fit = fit_link(times(alpha, bandwidth, noise=0.05, seed=seed))
        assert fit is not None
        assert fit.bytes_per_second == pytest.approx(bandwidth, rel=0.1)
        assert fit.alpha_seconds == pytest.approx(alpha, rel=0.1)


def test_the_errors_cover_the_truth_as_often_as_two_sigmas_should() -> None:
    alpha, bandwidth = LINKS["gloo"]
    inside = [0, 0]
    for seed in range(200):
        fit = fit_link(times(alpha, bandwidth, noise=0.05, seed=seed))
        assert fit is not None
        inside[0] += abs(fit.alpha_seconds - alpha) < 2 * fit.alpha_error_seconds
        inside[1] += abs(bandwidth / fit.bytes_per_second - 1) < 2 * fit.bandwidth_error
    assert all(170 <= count <= 200 for count in inside), inside  # 190 of 200 expected of a normal distribution


def test_the_errors_are_the_scatter_of_fits_that_cannot_tell_latency_from_bandwidth() -> None:
    alpha, bandwidth = LINKS["gloo"]
    sizes = [250_000 + 25_000 * number for number in range(12)]  # of which each takes about twice the latency
    found = []
    for seed in range(300):
        draw = random.Random(seed)
        fit = fit_link([(size, (alpha + size / bandwidth) * math.exp(draw.gauss(0, 0.01))) for size in sizes])
        assert fit is not None
        found.append((fit.alpha_seconds, 1 / fit.bytes_per_second, fit.alpha_error_seconds, fit.bandwidth_error))
    latencies, slopes, latency_errors, slope_errors = zip(*found, strict=True)
    assert statistics.median(latency_errors) == pytest.approx(statistics.stdev(latencies), rel=0.5)
    assert statistics.median(slope_errors) * statistics.mean(slopes) == pytest.approx(statistics.stdev(slopes), rel=0.5)


def test_four_wrong_points_of_nineteen_are_left_out() -> None:
    alpha, bandwidth = LINKS["gloo"]
    for seed in range(20):
        points = times(alpha, bandwidth, noise=0.03, seed=seed)
        wrong = random.Random(seed).sample(range(len(points)), 4)
        bent = [(size, seconds * 5 if place in wrong else seconds) for place, (size, seconds) in enumerate(points)]
        fit = fit_link(bent)
        assert fit is not None
        assert {points[place][0] for place in wrong} <= set(fit.outliers)
        assert fit.bytes_per_second == pytest.approx(bandwidth, rel=0.1)
        assert fit.alpha_seconds == pytest.approx(alpha, rel=0.1)


def test_a_line_without_latency_has_none() -> None:
    fit = fit_link([(size, size / 1e9) for size in SIZES])
    assert fit is not None
    assert fit.alpha_seconds == pytest.approx(0.0, abs=1e-9)


NO_LINES = {
    "nothing": [],
    "two sizes": [(1024, 1e-3), (2048, 2e-3)],
    "one size": [(1024, 1e-3)] * 5,
    "larger is faster": [(1024, 3e-3), (4096, 2e-3), (16384, 1e-3)],
    "no time": [(1, 0.0), (2, 1.0), (3, 2.0)],
}


@pytest.mark.parametrize("name", NO_LINES)
def test_what_is_no_line_gives_no_link(name: str) -> None:
    assert fit_link(NO_LINES[name]) is None

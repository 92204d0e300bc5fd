"""Failures, checkpoints, days and money, worked by hand."""

import math

import pytest

from trimaran.core import Seconds
from trimaran.cost import Faults, best_interval, bill_of, checkpoint_bytes, expected_goodput, write_seconds

NEVER = Faults(device_hours=math.inf, restart=Seconds(600))


def cost_of(interval: float, *, write: float, between: float) -> float:
    """Return the loss by Daly's model of random failures without a restart time."""
    return between * math.expm1((interval + write) / between) / interval


def test_twice_the_devices_fail_twice_as_often() -> None:
    faults = Faults(device_hours=50_000, restart=Seconds(300))
    assert faults.seconds_between(1000) == 50 * 3600
    assert faults.seconds_between(2000) == 25 * 3600


def test_short_writes_follow_youngs_rule() -> None:
    assert best_interval(Seconds(2), Seconds(40_000), restart=Seconds(0)) == pytest.approx(
        math.sqrt(2 * 2 * 40_000), rel=0.01
    )


@pytest.mark.parametrize(("write", "between"), [(10, 10_000), (120, 10_000), (900, 10_000)])
def test_no_other_interval_loses_less(write: float, between: float) -> None:
    best = best_interval(Seconds(write), Seconds(between), restart=Seconds(0))
    lost = cost_of(best, write=write, between=between)
    tried = (cost_of(best * factor / 100, write=write, between=between) for factor in range(50, 200))
    assert lost == pytest.approx(min(tried), rel=1e-3)


def test_an_interval_is_at_most_the_time_between_failures() -> None:
    assert best_interval(Seconds(30_000), Seconds(10_000), restart=Seconds(0)) == 10_000


def test_a_checkpoint_writes_weights_and_moments_at_disk_speed() -> None:
    assert checkpoint_bytes(7_000_000_000) == 84_000_000_000
    assert write_seconds(84e9, disk_bandwidth=2e9) == 42
    assert write_seconds(84e9, disk_bandwidth=2e9, stalls=0.1) == pytest.approx(4.2)


def test_fractions_add_up_and_a_run_without_failures_needs_no_checkpoints() -> None:
    found = expected_goodput(
        Faults(device_hours=40_000, restart=Seconds(600)), 1024, write=Seconds(30), step=Seconds(10), data=Seconds(11)
    )
    assert found.fraction + sum(found.lost.values()) == pytest.approx(1)
    assert found.lost["data"] == pytest.approx(found.fraction / 10)  # one second late per ten seconds of work
    calm = expected_goodput(NEVER, 1024, write=Seconds(30), step=Seconds(10))
    assert calm.fraction == 1
    assert calm.interval == math.inf


def test_a_failure_costs_the_restart_and_half_an_interval() -> None:
    faults = Faults(device_hours=1000, restart=Seconds(600))
    found = expected_goodput(faults, 100, write=Seconds(0), step=Seconds(10))
    assert found.lost["failures"] == pytest.approx(600 / 36_000)
    found = expected_goodput(faults, 100, write=Seconds(50), step=Seconds(10))
    assert found.lost["failures"] == pytest.approx((600 + (found.interval + 50) / 2) / 36_000)
    assert found.lost["checkpoints"] == pytest.approx((1 - found.lost["failures"]) * 50 / (found.interval + 50))


def test_more_devices_reduce_goodput() -> None:
    shares = [
        expected_goodput(
            Faults(device_hours=30_000, restart=Seconds(900)), num, write=Seconds(60), step=Seconds(5)
        ).fraction
        for num in (8, 512, 16_384)
    ]
    assert shares[0] > 0.99 > shares[1] > shares[2] > 0.3


def test_a_trillion_tokens_at_a_million_a_second_are_eleven_and_a_half_days() -> None:
    bill = bill_of(1e12, 1e6, num_devices=100, hour_price=2.0)
    assert bill.days == pytest.approx(11.574, rel=1e-4)
    assert bill.device_hours == pytest.approx(27_777.8, rel=1e-4)
    assert bill.cost == pytest.approx(55_555.6, rel=1e-4)
    assert bill_of(1e12, 1e6, num_devices=100, hour_price=2.0, goodput=0.5).cost == pytest.approx(2 * bill.cost)

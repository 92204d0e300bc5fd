"""When the state is copied to memory: copies take at most 1 % of the time, from the first on, whatever they cost."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from trimaran.core import Seconds
from trimaran.train import MAX_BOUNDED_COPY_FRACTION, CopySchedule, max_repeated_steps


@dataclass(kw_only=True)
class SimulatedRun:
    """A run whose copies take `host` seconds of the host, make the GPU wait `wait` seconds and slow two steps."""

    step: Callable[[int], float]
    host: Callable[[int], float]
    wait: float = 0.0
    slowdown: float = 0.0
    lost_seconds: float = 5.0
    num_slots: int = 3
    seconds: float = 0.0
    copied: list[int] = field(default_factory=list)
    bounds: dict[int, int] = field(default_factory=dict)

    def train(self, num_steps: int) -> CopySchedule:
        """Train as `Checkpointer.after_step` is called, from a copy of the first state on."""
        schedule = CopySchedule(
            "auto", lambda mine: mine[None], lost_seconds=Seconds(self.lost_seconds), num_slots=self.num_slots
        )
        self._copy(schedule, 0)
        for step in range(1, num_steps + 1):
            since = step - self.copied[-1]
            seconds = self.step(step) + self.wait * (since == 1) + self.slowdown / 2 * (since <= 2)
            self.seconds += seconds
            schedule.record_step(seconds)
            if since == 2:
                schedule.record_device_wait(self.wait)
            if schedule.is_review_due:
                schedule.review(commit_seconds=0.0)
            if schedule.is_due(step):
                self._copy(schedule, step)
            self.bounds[step] = max_repeated_steps(schedule.max_spacing)
        return schedule

    @property
    def cost_fraction(self) -> float:
        """The fraction of the time that copies took, without the last, which has not been paid for yet."""
        host = sum(self.host(number) for number in range(len(self.copied) - 1))
        return (host + (len(self.copied) - 1) * (self.wait + self.slowdown)) / self.seconds

    def _copy(self, schedule: CopySchedule, step: int) -> None:
        host = self.host(len(self.copied))
        self.seconds += host
        self.copied.append(step)
        schedule.record_copy(step, host)


def noisy(seconds: float, spread: float) -> Callable[[int], float]:
    """Return durations that differ by `spread`; one in fifty takes five times as long."""
    return lambda step: (
        seconds * (1 + spread * random.Random(step).random() + 4 * (random.Random(-step).random() < 0.02))
    )


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(SimulatedRun(step=lambda _: 0.03, host=lambda _: 0.008), id="host-bound"),
        pytest.param(SimulatedRun(step=lambda _: 0.03, host=lambda _: 0.0003, wait=0.012), id="GPU waits"),
        pytest.param(SimulatedRun(step=lambda _: 0.03, host=lambda _: 0.0001, slowdown=0.006), id="steps are slowed"),
        pytest.param(SimulatedRun(step=lambda _: 0.005, host=lambda _: 0.0005), id="short steps"),
        pytest.param(
            SimulatedRun(step=noisy(0.03, 0.3), host=lambda number: noisy(0.002, 0.5)(number)), id="noise"
        ),
        pytest.param(
            SimulatedRun(step=lambda _: 0.03, host=lambda number: 0.05 if number < 3 else 0.001), id="new slots"
        ),
        pytest.param(
            SimulatedRun(step=lambda step: 20.0 if step == 1 else 0.03, host=lambda _: 0.002), id="compiled step"
        ),
        pytest.param(SimulatedRun(step=lambda _: 0.3, host=lambda _: 0.2), id="dear copies"),
    ],
)  # fmt: skip
def test_copies_take_at_most_one_percent_of_the_time_from_the_first_on(run: SimulatedRun) -> None:
    run.train(1000)
    assert len(run.copied) > 1
    assert run.cost_fraction <= MAX_BOUNDED_COPY_FRACTION, run.copied


def test_cheap_copies_are_made_at_every_step_after_the_first_ones() -> None:
    run = SimulatedRun(step=lambda _: 0.25, host=lambda number: 0.01 if number < 3 else 0.0005)
    assert run.train(100).every == 1
    assert run.copied[:4] == [0, 8, 16, 24], "the first copy to each of three slots costs 10 ms"
    assert run.copied[-60:] == [*range(41, 101)]


def test_noise_alone_does_not_make_copies_rare() -> None:
    run = SimulatedRun(step=noisy(0.25, 0.2), host=lambda _: 0.0005)
    assert run.train(2000).every == 1


def test_the_stated_bound_holds_at_every_step() -> None:
    for host in (0.0001, 0.002, 0.03):
        run = SimulatedRun(step=noisy(0.03, 0.3), host=noisy(host, 2.0))
        run.train(1000)
        older = dict(zip(run.copied[1:], run.copied[:-1], strict=True))
        for step, bound in run.bounds.items():
            # At worst the copy of this step is not committed yet, nor is the step after it logged.
            behind = step - older[step] if step in older else step - max(each for each in run.copied if each <= step)
            assert behind + 1 <= bound


def test_steps_that_take_longer_than_may_be_lost_are_copied_at_once_if_that_is_cheap() -> None:
    run = SimulatedRun(step=lambda _: 20.0, host=lambda _: 0.05)
    run.train(20)
    assert run.copied == [0, 2, 4, 6, 8, *range(10, 21)], "each of the first copies is timed for two steps"


def test_all_ranks_copy_as_the_slowest_needs() -> None:
    costs = iter([0.001, 0.004])
    exchanged: list[np.ndarray] = []

    def gather(mine: np.ndarray) -> np.ndarray:
        exchanged.append(mine)
        return np.stack([mine, np.array([4_000_000, 20_000_000, 50_000_000])])

    schedule = CopySchedule("auto", gather, num_slots=0)
    schedule.record_copy(0, next(costs))
    schedule.record_device_wait(0.0)
    for _ in range(2):
        assert not schedule.is_review_due
        schedule.record_step(0.01)
    assert schedule.is_review_due
    schedule.review(commit_seconds=0.001)
    assert exchanged[0].tolist() == [1_000_000, 10_000_000, 1_000_000]
    assert (schedule.every, schedule.step_seconds, schedule.commit_seconds) == (40, 0.02, 0.05)
    assert not schedule.is_review_due


def test_a_fixed_interval_stays_and_steps_are_timed() -> None:
    schedule = CopySchedule(1, lambda mine: pytest.fail("no exchange is needed"))
    for step in range(1, 10):
        schedule.record_step(9.0 if step == 1 else 0.01)
        if schedule.is_review_due:
            schedule.review(commit_seconds=0.0)
        assert schedule.is_due(step)
        schedule.record_copy(step, 0.5)
        schedule.record_device_wait(0.0)
    assert (schedule.every, schedule.max_spacing, schedule.step_seconds) == (1, 1, 0.01)

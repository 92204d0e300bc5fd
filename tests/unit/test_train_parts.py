"""The small parts of the trainer: schedule, clock, stop request, loss."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from trimaran.core import TrainSection
from trimaran.parallel import learning_rate
from trimaran.train import StepClock, StopRequest, summed_loss


def rates(kind: str, **schedule: object) -> list[float]:
    train = TrainSection.model_validate(
        {"steps": 100, "lr": 1.0, "schedule": {"kind": kind, "warmup_steps": 10} | schedule}
    )
    return [learning_rate(step, train) for step in range(100)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_warms_up_linearly_to_the_peak(kind: str) -> None:
    assert rates(kind)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates(kind)) == 1.0


def test_cosine_and_linear_are_half_way_down_in_the_middle() -> None:
    for kind in ("cosine", "linear"):
        assert rates(kind, floor=0.0)[55] == pytest.approx(0.5)
        assert rates(kind, floor=0.2)[55] == pytest.approx(0.6)
        assert rates(kind, floor=0.1)[99] < 0.12


def test_wsd_stays_at_the_peak_and_then_decays() -> None:
    rates_wsd = rates("wsd", decay_steps=20, floor=0.0)
    assert set(rates_wsd[10:80]) == {1.0}
    assert rates_wsd[90] == pytest.approx(0.5)
    assert rates("wsd", floor=0.0) == rates_wsd, "a fifth of the run without decay_steps"


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == 1.0


def test_the_laps_of_a_clock_add_up_to_the_elapsed_time() -> None:
    outer = time.perf_counter()
    clock = StepClock(torch.device("cpu"))
    inner = time.perf_counter()
    for phase in ("data", "forward", "backward", "forward"):
        time.sleep(0.01)
        shortest = time.perf_counter() - inner
        clock.lap(phase)
    longest = time.perf_counter() - outer
    phases = clock.end_step()().phases
    assert shortest <= sum(phases.values()) <= longest
    assert phases["forward"] >= 0.02  # its two laps; a busy machine sleeps longer
    assert min(phases["data"], phases["backward"]) >= 0.01
    time.sleep(0.02)
    clock.restart()
    clock.lap("data")
    assert sum(clock.end_step()().phases.values()) < 0.01, "time before a restart is discarded"


def test_a_signal_or_the_stop_file_is_a_stop_request(tmp_path: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        request = StopRequest(tmp_path / "stop")
        assert not request
        (tmp_path / "stop").touch()
        assert request
        without_file = StopRequest(None)
        without_file.listen()
        assert not without_file
        os.kill(os.getpid(), signal.SIGTERM)
        assert without_file
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_the_loss_is_a_sum_over_valid_labels() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, -100, 0, 6, 3]])
    by_hand = -sum(
        logits[row, column].log_softmax(-1)[labels[row, column]]
        for row in range(2)
        for column in range(5)
        if labels[row, column] >= 0
    )
    assert summed_loss(logits, labels) == pytest.approx(float(by_hand))

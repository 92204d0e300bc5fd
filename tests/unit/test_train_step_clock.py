"""The step clock: laps and the spans inside them."""

import time
from itertools import count

import pytest
import torch

from trimaran.train import StepClock

MILLISECONDS = 1000


def test_a_lap_that_is_split_into_spans_still_adds_up() -> None:
    clock = StepClock(torch.device("cpu"))
    began = time.perf_counter()
    clock.lap("data")
    spans = clock.span_timer()
    for phase in ("forward", "backward", "forward"):
        with spans.span(phase):
            time.sleep(0.02)
        time.sleep(0.01)
    rest = clock.split_lap(spans, rest="comm")
    clock.lap("comm")
    phases, seconds = clock.end_step()().phases, time.perf_counter() - began
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.01)
    assert phases["forward"] >= 0.04
    assert phases["backward"] >= 0.02
    assert phases["comm"] >= rest() >= 0.03
    assert clock.end_step()().phases == {}, "the next step starts where this one ended"


def test_a_span_inside_another_takes_its_time_away_from_it() -> None:
    clock = StepClock(torch.device("cpu"))
    spans = clock.span_timer()
    with spans.span("forward"):
        with spans.span("comm", "tp"):
            time.sleep(0.03)
        time.sleep(0.01)
    clock.split_lap(spans, rest="comm", axis="pp")
    time.sleep(0.02)
    clock.lap("comm")
    outer = spans.outer_seconds_by_axis(("forward",))[""]
    phases, comm = clock.end_step()()
    assert comm["tp"] >= 0.03
    assert comm["world"] >= 0.02
    assert outer == pytest.approx(phases["forward"] + comm["tp"])
    assert sum(comm.values()) == pytest.approx(phases["comm"])
    assert phases["forward"] < outer - 0.03 + 1e-9


def test_a_span_that_raises_is_not_measured() -> None:
    clock = StepClock(torch.device("cpu"))
    spans = clock.span_timer()
    with pytest.raises(ValueError, match="late"), spans.span("forward"), spans.span("comm", "tp"):
        raise ValueError("late")
    with spans.span("backward"):
        pass
    assert list(spans.seconds()) == ["backward"]


def test_the_host_time_has_no_data_and_no_checkpoint() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        for phase in ("data", "forward", "backward", "comm", "checkpoint", "optimizer", "data", "checkpoint"):
            time.sleep(0.03)
            clock.lap(phase)
        host, seconds = clock.host_time(), clock.end_step()().phases
        issued = sum(seconds[phase] for phase in ("forward", "backward", "comm", "optimizer"))
        assert host.seconds == pytest.approx(
            issued, abs=0.02
        )  # less than a lap; a busy machine may stop between clocks
        assert host.seconds < sum(seconds.values()) - 0.09
        assert not host.is_limit, "a CPU is its own host"
    clock.lap("forward")
    clock.restart()
    assert clock.host_time().seconds == 0


@pytest.mark.parametrize("is_done", [True, False])
def test_the_host_is_the_limit_if_the_gradients_are_there_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    recorded: list[str] = []
    asked: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.after = ""

        def record(self) -> None:
            self.after = recorded[-1] if recorded else ""

        def query(self) -> bool:
            asked.append(self.after)
            return is_done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    assert not clock.host_time().is_limit, "nothing was issued"
    for phase in ("data", "forward", "backward", "comm", "optimizer", "checkpoint"):
        recorded.append(phase)
        clock.lap(phase)
    assert clock.host_time().is_limit == is_done
    assert asked == ["comm"], "the mark after the gradients, not the one after the update"


def test_the_clock_of_a_gpu_uses_its_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is read while the next one runs, and its details after its seconds."""
    ticks, events = count(), []

    class Event:
        """An event that is recorded one second after the one before."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            events.append(self)

        def record(self) -> None:
            self.at = next(ticks)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: "Event") -> float:
            return MILLISECONDS * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, pending, num_events = StepClock(torch.device("cuda")), None, 0
    for step in range(10):
        clock.lap("data")
        spans = clock.span_timer()
        for _ in range(1 + step % 2):  # steps may have different numbers of events
            with spans.span("forward"):
                clock.span_timer()
        rest = clock.split_lap(spans, rest="comm")
        clock.lap("optimizer")
        seconds = (pending[0](), pending[1]()) if pending else None
        if seconds is not None:
            num_spans = 1 + (step - 1) % 2
            assert seconds[0].phases == {"data": 1, "forward": num_spans, "comm": num_spans + 1, "optimizer": 1}
            assert seconds[1] == num_spans + 1
        pending = clock.end_step(), rest
        if step == 4:
            num_events = len(events)
    assert len(events) == num_events

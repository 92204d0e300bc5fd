"""The step clock: laps and the spans inside them."""

import time
from itertools import count

import pytest
import torch

from trimaran.parallel import AXIS_WAITS
from trimaran.train import PhaseListener, StepClock, TracedPhases, attribute

MILLISECONDS = 1000


def test_a_lap_that_is_split_into_spans_still_adds_up() -> None:
    clock = StepClock(torch.device("cpu"))
    began = time.perf_counter()
    clock.lap("data")
    for phase in ("forward", "backward", "forward"):
        with clock.span(phase):
            time.sleep(0.02)
        time.sleep(0.01)
    clock.lap("comm")
    read_lap = clock.last_lap()
    clock.lap("comm")
    phases, seconds = clock.end_step()().phases, time.perf_counter() - began
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.01)
    assert phases["forward"] >= 0.04
    assert phases["backward"] >= 0.02
    assert phases["comm"] >= attribute(read_lap()).phases["comm"] >= 0.03
    assert clock.end_step()().phases == {}, "the next step starts where this one ended"


def test_a_span_inside_another_takes_its_time_away_from_it() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.span("forward", stage=3):
        with clock.span("comm", "tp"):
            time.sleep(0.03)
        time.sleep(0.01)
    clock.lap("comm", "pp")
    time.sleep(0.02)
    clock.lap("comm")
    phases, comm, stages = clock.end_step()()
    assert comm["tp"] >= 0.03
    assert comm["world"] >= 0.02
    assert stages == {3: pytest.approx(phases["forward"] + comm["tp"])}
    assert sum(comm.values()) == pytest.approx(phases["comm"])
    assert phases["forward"] < stages[3] - 0.03 + 1e-9


def test_a_span_that_raises_is_not_measured() -> None:
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(ValueError, match="late"), clock.span("forward"), clock.span("comm", "tp"):
        raise ValueError("late")
    with clock.span("backward"):
        pass
    clock.lap("optimizer")
    assert set(clock.end_step()().phases) == {"backward", "optimizer"}


def test_waits_are_measured_until_the_lap_ends_for_the_timed_axes() -> None:
    clock = StepClock(torch.device("cpu"), timed_axes=["dp_shard"])
    clock.time_waits()
    for axis in ("tp", "dp_shard"):
        with AXIS_WAITS.span(axis):
            time.sleep(0.01)
    clock.lap("forward")
    with AXIS_WAITS.span("dp_shard"):
        time.sleep(0.01)
    clock.lap("backward")
    phases, comm, _ = clock.end_step()()
    assert list(comm) == ["dp_shard"]
    assert min(phases.values()) >= 0.01


def test_a_discarded_lap_is_not_part_of_the_step() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.lap("data")
    time.sleep(0.03)
    clock.lap(None)
    clock.lap("forward")
    phases = clock.end_step()().phases
    assert set(phases) == {"data", "forward"}
    assert sum(phases.values()) < 0.03


class Told(PhaseListener):
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def enter(self, phase: str) -> None:
        self.texts.append(f"enter {phase}")

    def end_lap(self, phase: str | None) -> None:
        self.texts.append(f"end lap {phase}")

    def begin_span(self, phase: str, axis: str, stage: int | None) -> None:
        self.texts.append(f"begin {phase} {axis} {stage}")

    def end_span(self, phase: str | None) -> None:
        self.texts.append(f"end {phase}")


def test_listeners_are_told_of_phases_until_they_stop() -> None:
    clock, first, second = StepClock(torch.device("cpu")), Told(), Told()
    stop_first, stop_second = clock.listen(first), clock.listen(second)
    clock.lap("data", then="forward")
    with clock.span("forward", stage=1), pytest.raises(ValueError, match="late"), clock.span("comm", "tp"):
        raise ValueError("late")
    stop_first()
    clock.lap("forward")
    clock.lap(None)
    stop_second()
    clock.lap("comm", then="optimizer")
    inside = ["begin forward world 1", "begin comm tp None", "end None", "end forward"]
    assert first.texts == ["end lap data", "enter forward", *inside]
    assert second.texts == [*first.texts, "end lap forward", "end lap None"]


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


def test_traced_intervals_do_not_overlap_and_time_between_spans_belongs_to_the_lap() -> None:
    clock, traced = StepClock(torch.device("cpu")), TracedPhases(lambda: 7)
    stop = clock.listen(traced)
    clock.lap("data")
    with clock.span("forward", stage=0), clock.span("comm", "tp"):
        pass
    with clock.span("backward", stage=0):
        pass
    clock.lap("comm", "pp")
    clock.lap(None)
    clock.lap("optimizer")
    stop()
    steps, phases, starts, ends = zip(*traced.intervals, strict=True)
    assert set(steps) == {7}
    # Before the first span, inside it, and after it; between the spans, and after both.
    assert phases == ("data", "comm", "forward", "comm", "forward", "comm", "backward", "comm", "optimizer")
    assert ends[:-2] == starts[1:-1], "they follow each other, except where a lap was discarded"
    assert all(start <= end for start, end in zip(starts, ends, strict=True))


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
        for _ in range(1 + step % 2):  # steps may have different numbers of events
            with clock.span("forward"):
                pass
        clock.lap("comm")
        read_lap = clock.last_lap()
        clock.lap("optimizer")
        seconds = (pending[0](), pending[1]()) if pending else None
        if seconds is not None:
            num_spans = 1 + (step - 1) % 2
            assert seconds[0].phases == {"data": 1, "forward": num_spans, "comm": num_spans + 1, "optimizer": 1}
            assert attribute(seconds[1]).phases == {"forward": num_spans, "comm": num_spans + 1}
        pending = clock.end_step(), read_lap
        if step == 4:
            num_events = len(events)
    assert len(events) == num_events

"""The step clock: laps and the spans inside them."""

import time

import pytest
import torch

from trimaran.train.metrics.step_clock import StepClock


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
    phases, seconds = clock.end_step()(), time.perf_counter() - began
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.01)
    assert phases["forward"] >= 0.04
    assert phases["backward"] >= 0.02
    assert phases["comm"] >= rest() >= 0.03
    assert clock.end_step()() == {}, "the next step starts where this one ended"

"""Laps and what is seen inside of them."""

import time

import pytest
import torch

from trimaran.train.metrics.step_clock import Clock


def test_a_lap_is_split_by_what_a_watch_saw_and_still_adds_up() -> None:
    clock = Clock(torch.device("cpu"))
    began = time.perf_counter()
    clock.lap("data")
    watch = clock.stopwatch()
    for phase in ("forward", "backward", "forward"):
        with watch.run(phase):
            time.sleep(0.02)
        time.sleep(0.01)
    rest = clock.split(watch, rest="comm")
    clock.lap("comm")
    phases, seconds = clock.read()(), time.perf_counter() - began
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.01)
    assert phases["forward"] >= 0.04
    assert phases["backward"] >= 0.02
    assert phases["comm"] >= rest() >= 0.03
    assert clock.read()() == {}, "the next step starts where this one ended"

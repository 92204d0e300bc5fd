"""The choice of loader processes and prefetch depth, on simulated machines."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran.data import EXTRA_BATCHES_AHEAD, LoaderLimits, LoaderSetting, LoaderTuner, LoaderWindow
from trimaran.train import RankInfo, rank_loader_limits

LIMITS = LoaderLimits(cores=8, free_bytes=64 << 30, pin_memory=True)
THREAD = LoaderSetting(workers=0, depth=EXTRA_BATCHES_AHEAD, pin=True)


def window(
    setting: LoaderSetting, *, load: float, step: float, speedup: int = 64, batch_bytes: int = 1 << 20
) -> LoaderWindow:
    """Return the measurements of ten steps when at most `speedup` loaders run in parallel."""
    loaders = min(max(1, setting.workers), speedup)
    step_time = max(step, load / loaders)
    waited = 10 * max(0.0, step_time - step)
    # Loaders beyond that slow each other down.
    spent = 10 * load * max(1, setting.workers) / loaders
    return LoaderWindow(
        batches=10,
        seconds=10 * step_time,
        waited_seconds=waited,
        load_seconds=spent,
        landing_seconds=0.0,
        batch_bytes=batch_bytes,
    )


def run(tuner: LoaderTuner, windows: int, **machine: Any) -> list[LoaderSetting]:
    """Return the settings chosen in this many windows."""
    chosen = []
    for _ in range(windows):
        if choice := tuner.choose(window(tuner.setting, **machine)):
            chosen.append(choice[0])
    return chosen


@pytest.mark.parametrize(("load", "workers"), [(0.05, 0), (0.099, 0), (0.15, 2), (0.45, 6), (5.0, 8)])
def test_the_tuner_adds_just_enough_processes(load: float, workers: int) -> None:
    tuner = LoaderTuner(LIMITS, THREAD)
    chosen = run(tuner, 100, load=load, step=0.1)
    assert tuner.setting.workers == workers
    assert len(chosen) <= 1


def test_processes_that_do_not_help_are_removed_and_retried_less_and_less() -> None:
    tuner = LoaderTuner(LIMITS, LoaderSetting(workers=2, depth=4))
    chosen = run(tuner, 200, load=0.4, step=0.1, speedup=2)
    assert tuner.setting.workers == 2
    assert 2 <= len(chosen) <= 12


def test_unneeded_processes_are_removed_slowly_and_added_back_at_once() -> None:
    tuner = LoaderTuner(LIMITS, THREAD)
    run(tuner, 5, load=0.45, step=0.1)
    assert tuner.setting.workers == 6
    shrunk = run(tuner, 40, load=0.05, step=0.1)
    assert [each.workers for each in shrunk] == [5, 4, 3, 2, 1]
    back = run(tuner, 1, load=0.45, step=0.1)
    assert [each.workers for each in back] == [6]


def test_a_load_near_the_threshold_does_not_cause_oscillation() -> None:
    tuner = LoaderTuner(LIMITS, THREAD)
    changes = 0
    for number in range(400):
        changes += len(run(tuner, 1, load=0.21 if number // 7 % 2 else 0.14, step=0.1))
    assert changes <= 6


def test_occasional_late_batches_increase_the_depth() -> None:
    tuner = LoaderTuner(LIMITS, LoaderSetting(workers=4, depth=6))
    jitter = LoaderWindow(
        batches=10, seconds=1.1, waited_seconds=0.1, load_seconds=1.5, landing_seconds=0, batch_bytes=1 << 20
    )
    depths = [choice[0].depth for _ in range(5) if (choice := tuner.choose(jitter))]
    assert depths == [12, 24, 32]
    assert tuner.setting.workers == 4


def test_memory_limits_processes_and_depth() -> None:
    limits = LoaderLimits(cores=64, free_bytes=64 << 30)
    tuner = LoaderTuner(limits, THREAD)
    run(tuner, 9, load=9.0, step=0.1, batch_bytes=1 << 30)
    assert tuner.setting.workers == 4
    assert tuner.setting.depth <= 16
    assert tuner.set_batch_bytes(9 << 30).depth == 1


def test_the_handover_wait_changes_nothing() -> None:
    tuner = LoaderTuner(LIMITS, THREAD)
    short_waits = LoaderWindow(
        batches=1000, seconds=5, waited_seconds=0.4, load_seconds=1, landing_seconds=0, batch_bytes=1 << 10
    )
    assert tuner.choose(short_waits) is None


def test_memory_is_pinned_only_while_pinning_is_cheap() -> None:
    tuner = LoaderTuner(LIMITS, THREAD)
    assert tuner.set_batch_bytes(1 << 20).pin
    slow_landing = LoaderWindow(
        batches=10, seconds=2, waited_seconds=1, load_seconds=1, landing_seconds=0.9, batch_bytes=1 << 20
    )
    choice = tuner.choose(slow_landing)
    assert choice is not None
    assert not choice[0].pin
    assert "pinning" in choice[1]
    assert not LoaderTuner(LIMITS, THREAD).set_batch_bytes(10 << 30).pin


def test_local_ranks_share_the_cores_and_the_memory_of_their_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    (tmp_path / "memory.max").write_text(str(1 << 20))
    (tmp_path / "memory.current").write_text("0")
    (tmp_path / "memory.stat").write_text("file 0\nshmem 0\n")
    place = RankInfo(rank=0, world_size=8, local_rank=0, device=torch.device("cpu"), local_world_size=4)
    assert rank_loader_limits(place, tmp_path) == LoaderLimits(cores=0, free_bytes=1 << 18)
    assert rank_loader_limits(replace(place, local_world_size=1), tmp_path).cores <= 1
    (tmp_path / "cpu.max").write_text("max 100000")
    assert rank_loader_limits(replace(place, local_world_size=1), tmp_path).cores == len(os.sched_getaffinity(0)) - 1

"""How many processes load, and how far ahead, on simulated machines."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trimaran.data.loader_tuner import AHEAD, LoaderLimits, Seen, Setting, Tuner
from trimaran.train.inputs.loader_limits import room_of
from trimaran.train.process.rank_info import RankInfo

ROOM = LoaderLimits(cores=8, free_bytes=64 << 30, pin_memory=True)
THREAD = Setting(workers=0, depth=AHEAD, pin=True)


def window(setting: Setting, *, load: float, step: float, speedup: int = 64, batch_bytes: int = 1 << 20) -> Seen:
    """What ten steps look like when at most `speedup` loaders can load at the same time."""
    loaders = min(max(1, setting.workers), speedup)
    pace = max(step, load / loaders)
    waited = 10 * max(0.0, pace - step)
    # Loaders that get in each other's way are all slower.
    spent = 10 * load * max(1, setting.workers) / loaders
    return Seen(
        batches=10,
        seconds=10 * pace,
        waited_seconds=waited,
        load_seconds=spent,
        landing_seconds=0.0,
        batch_bytes=batch_bytes,
    )


def run(tuner: Tuner, windows: int, **machine: float) -> list[Setting]:
    """Return every setting that was chosen in so many windows."""
    chosen = []
    for _ in range(windows):
        if found := tuner.choose(window(tuner.setting, **machine)):
            chosen.append(found[0])
    return chosen


@pytest.mark.parametrize(("load", "workers"), [(0.05, 0), (0.099, 0), (0.15, 2), (0.45, 6), (5.0, 8)])
def test_as_many_processes_as_keep_up_and_no_more(load: float, workers: int) -> None:
    tuner = Tuner(ROOM, THREAD)
    chosen = run(tuner, 100, load=load, step=0.1)
    assert tuner.setting.workers == workers
    assert len(chosen) <= 1


def test_processes_that_do_not_help_are_taken_away_and_tried_ever_more_rarely() -> None:
    tuner = Tuner(ROOM, Setting(workers=2, depth=4))
    chosen = run(tuner, 200, load=0.4, step=0.1, speedup=2)
    assert tuner.setting.workers == 2
    assert 2 <= len(chosen) <= 12


def test_what_is_needed_no_longer_is_given_up_slowly_and_comes_back_at_once() -> None:
    tuner = Tuner(ROOM, THREAD)
    run(tuner, 5, load=0.45, step=0.1)
    assert tuner.setting.workers == 6
    shrunk = run(tuner, 40, load=0.05, step=0.1)
    assert [each.workers for each in shrunk] == [5, 4, 3, 2, 1]
    back = run(tuner, 1, load=0.45, step=0.1)
    assert [each.workers for each in back] == [6]


def test_a_load_at_the_edge_does_not_make_it_swing() -> None:
    tuner = Tuner(ROOM, THREAD)
    changes = 0
    for number in range(400):
        changes += len(run(tuner, 1, load=0.21 if number // 7 % 2 else 0.14, step=0.1))
    assert changes <= 6


def test_batches_that_are_late_now_and_then_are_asked_for_earlier() -> None:
    tuner = Tuner(ROOM, Setting(workers=4, depth=6))
    jitter = Seen(batches=10, seconds=1.1, waited_seconds=0.1, load_seconds=1.5, landing_seconds=0, batch_bytes=1 << 20)
    depths = [found[0].depth for _ in range(5) if (found := tuner.choose(jitter))]
    assert depths == [12, 24, 32]
    assert tuner.setting.workers == 4


def test_memory_bounds_processes_and_batches_ahead() -> None:
    room = LoaderLimits(cores=64, free_bytes=64 << 30)
    tuner = Tuner(room, THREAD)
    run(tuner, 9, load=9.0, step=0.1, batch_bytes=1 << 30)
    assert tuner.setting.workers == 4
    assert tuner.setting.depth <= 16
    assert tuner.first(9 << 30).depth == 1


def test_waiting_that_is_the_price_of_handing_over_changes_nothing() -> None:
    tuner = Tuner(ROOM, THREAD)
    seen = Seen(batches=1000, seconds=5, waited_seconds=0.4, load_seconds=1, landing_seconds=0, batch_bytes=1 << 10)
    assert tuner.choose(seen) is None


def test_memory_is_pinned_only_while_that_is_cheap() -> None:
    tuner = Tuner(ROOM, THREAD)
    assert tuner.first(1 << 20).pin
    seen = Seen(batches=10, seconds=2, waited_seconds=1, load_seconds=1, landing_seconds=0.9, batch_bytes=1 << 20)
    found = tuner.choose(seen)
    assert found is not None
    assert not found[0].pin
    assert "pinning" in found[1]
    assert not Tuner(ROOM, THREAD).first(10 << 30).pin


def test_local_ranks_share_the_cores_and_the_memory_of_their_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    (tmp_path / "memory.max").write_text(str(1 << 20))
    (tmp_path / "memory.current").write_text("0")
    (tmp_path / "memory.stat").write_text("file 0\nshmem 0\n")
    place = RankInfo(rank=0, world_size=8, local_rank=0, device=torch.device("cpu"), local_world_size=4)
    assert room_of(place, tmp_path) == LoaderLimits(cores=0, free_bytes=1 << 18)
    assert room_of(replace(place, local_world_size=1), tmp_path).cores <= 1
    (tmp_path / "cpu.max").write_text("max 100000")
    assert room_of(replace(place, local_world_size=1), tmp_path).cores == len(os.sched_getaffinity(0)) - 1

"""Checkpoints that are damaged, disks that are full, read-only or slow. F19 to F25 of the fault matrix, end to end.

What damage there can be to a checkpoint, file by file and call by call, is shown by `tests/unit/test_checkpoint_*` and
`tests/dist/test_keeper.py`; here a supervised run meets it.
"""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.fault_run import assert_as_undisturbed, hurry, lose, resumes, sail, sail_on
from tests.disks import mounted, remount
from tests.fault.harness import wait_for
from trimaran.checkpoint.step_dirs import steps
from trimaran.checkpoint.verify_checkpoint import verify
from trimaran.core import EXIT_DONE
from trimaran.run import RunDirectory

pytestmark = pytest.mark.chaos


def newest(run: RunDirectory) -> Path:
    return run.checkpoints / f"step-{max(steps(run.checkpoints)):08d}"


def wait_for_checkpoints(run: RunDirectory, number: int, *, after: int = -1) -> None:
    wait_for(lambda: sum(step > after for step in steps(run.checkpoints)) >= number)


def flip(folder: Path) -> str:
    file = folder / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    _replace(file, bytes(data))
    return file.name


def empty(folder: Path) -> str:
    _replace(folder / "rank-00000.safetensors", b"")
    return "rank-00000.safetensors"


def lose_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest"


def swap(folder: Path) -> str:
    one, other = (folder / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    texts = one.read_bytes(), other.read_bytes()
    _replace(one, texts[1])
    _replace(other, texts[0])
    return "rank-0000"


def bring_in_another_step(folder: Path) -> str:
    other = min(each for each in folder.parent.glob("step-*") if each != folder)
    _replace(folder / "rank-00001.safetensors", (other / "rank-00001.safetensors").read_bytes())
    return "rank-00001.safetensors"


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(tmp_path: Path) -> None:
    """F19, F20."""
    damages: list[Callable[[Path], str]] = [flip, empty, lose_manifest, swap, bring_in_another_step]
    settings = ("train.steps=300", "checkpoint.every=10", "checkpoint.keep=4")
    sailing = sail(tmp_path / "run", *settings, pause=0.03)
    for number, damage in enumerate(damages):
        with sailing:
            sailing.wait_for_step(10 * (number + 3) + 5)
            wait_for_checkpoints(sailing.run, 2)
            lose(sailing)
        folder = newest(sailing.run)
        bad, good = int(folder.name.removeprefix("step-")), sorted(steps(sailing.run.checkpoints))[-2]
        named = damage(folder)
        sailing = sail_on(sailing.run, pause=0.03)
        lost, told = sailing.wait_for_trouble(2 * number, 30), sailing.wait_for_trouble(2 * number + 1, 30)
        assert (lost.cause, lost.action) == ("host", "restarted")
        assert (told.cause, told.action, told.step) == ("storage", "continued", good)
        assert named in told.what
        assert f"step {bad}" in told.what
        assert not folder.exists() or verify(folder) == []  # it may have been written again by now
        assert list(folder.parent.glob(f"refused-{folder.name}*/why.json"))
    with sailing:
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert len(sailing.troubles) == 2 * len(damages)
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


def test_a_run_that_dies_while_it_saves_always_has_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    """F21: the disk is so slow that something is always being written or deleted."""
    chance = random.Random(0)
    sailing = sail(tmp_path / "run", "train.steps=200", "checkpoint.every=5", disk_seconds="0.05")
    for _ in range(4):
        with sailing:
            wait_for_checkpoints(sailing.run, 1, after=max(steps(sailing.run.checkpoints), default=0))
            time.sleep(chance.uniform(0.0, 0.6))
            lose(sailing)
        folder = newest(sailing.run)
        assert verify(folder) == []
        starts = len(sailing.events(0, "ready"))
        sailing = sail_on(sailing.run, disk_seconds="0.05")
        sailing.wait_for_events(0, "ready", starts + 1)
        last = resumes(sailing.run)[-1]
        assert (last["tier"], last["from_step"], last["refused"]) == ("disk", int(folder.name[5:]), [])
    with sailing:
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert not list(sailing.run.checkpoints.glob(".*.draft"))
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint and a half, to be mounted as the run's folder of checkpoints."""
    with mounted(tmp_path / "disk", "size=600k") as folder:
        yield folder


def test_a_disk_that_is_full_or_read_only_costs_checkpoints_and_nothing_else(tmp_path: Path, small_disk: Path) -> None:
    """F22."""
    with sail(tmp_path / "run", "train.steps=600", "checkpoint.every=10", "checkpoint.memory=1") as sailing:
        subprocess.run(["mount", "--bind", str(small_disk), str(_made(sailing.run.checkpoints))], check=True)
        try:
            full = sailing.wait_for_trouble(0, 30)
            assert (full.cause, full.action) == ("storage", "continued")
            assert "No space left on device" in full.what
            assert verify(newest(sailing.run)) == []
            remount(small_disk, "size=20m")
            wait_for_checkpoints(sailing.run, 1, after=max(steps(sailing.run.checkpoints)))
            remount(sailing.run.checkpoints, "bind,ro")
            read_only = sailing.wait_for_trouble(1, 30)
            assert (read_only.cause, read_only.action) == ("storage", "continued")
            assert "Read-only file system" in read_only.what
            remount(sailing.run.checkpoints, "bind,rw")
            wait_for_checkpoints(sailing.run, 1, after=max(steps(sailing.run.checkpoints)))
            hurry(sailing)
            assert sailing.wait() == EXIT_DONE
            assert verify(newest(sailing.run)) == []
        finally:
            subprocess.run(["umount", "-l", str(sailing.run.checkpoints)], check=True)
    assert sailing.attempts() == 1
    assert len(sailing.troubles) == 2


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_saves_that_outlast_their_interval_wait_for_each_other_and_the_last_is_awaited(tmp_path: Path) -> None:
    """F23: a save takes over a second, and one is wanted every half second."""
    with sail(tmp_path / "run", "train.steps=100", "checkpoint.every=10", disk_seconds="0.25") as sailing:
        assert sailing.wait() == EXIT_DONE
    saves = sailing.events(0, "checkpoint")
    assert [each["data"].get("failed") for each in saves] == [None] * len(saves)
    assert saves[-1]["step"] == 100
    assert saves[-1]["data"]["skipped"] > 0
    for one, other in pairwise(saves):
        assert other["time"] - other["data"]["seconds"] >= one["time"] - 0.2  # events are filed at the next step
    assert max(each["data"]["stall_seconds"] for each in saves) < 0.1
    assert sailing.troubles == []
    assert verify(newest(sailing.run)) == []

"""Damaged checkpoints and disks that are full, read-only or slow: `checkpoint-damaged` to `memory-lost` in the guide.

`tests/unit/test_checkpoint_*` and `tests/dist/test_checkpointer.py` cover damage file by file and call by call. Here a
supervised run has to handle it.
"""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.fault_run import (
    assert_as_undisturbed,
    kill_supervisor,
    remove_pause,
    resume_run,
    resumes,
    start_run,
)
from tests.disks import mounted, remount
from tests.fault.harness import wait_for
from trimaran.checkpoint import complete_steps, verify
from trimaran.core import EXIT_AGAIN, EXIT_DONE
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


def newest_checkpoint(run: RunDirectory) -> Path:
    return run.checkpoints / f"step-{max(complete_steps(run.checkpoints)):08d}"


def wait_for_checkpoints(run: RunDirectory, number: int, *, after: int = -1) -> None:
    wait_for(lambda: sum(step > after for step in complete_steps(run.checkpoints)) >= number)


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


def copy_from_another_step(folder: Path) -> str:
    other = min(each for each in folder.parent.glob("step-*") if each != folder)
    _replace(folder / "rank-00001.safetensors", (other / "rank-00001.safetensors").read_bytes())
    return "rank-00001.safetensors"


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(tmp_path: Path) -> None:
    """Faults `checkpoint-damaged` and `checkpoint-stale`."""
    damages: list[Callable[[Path], str]] = [flip, empty, lose_manifest, swap, copy_from_another_step]
    settings = ("train.steps=300", "checkpoint.every=10", "checkpoint.keep=4")
    supervised = start_run(tmp_path / "run", *settings, pause=0.03)
    for number, damage in enumerate(damages):
        with supervised:
            supervised.wait_for_step(10 * (number + 3) + 5)
            wait_for_checkpoints(supervised.run, 2)
            kill_supervisor(supervised)
        folder = newest_checkpoint(supervised.run)
        bad, good = int(folder.name.removeprefix("step-")), sorted(complete_steps(supervised.run.checkpoints))[-2]
        named = damage(folder)
        supervised = resume_run(supervised.run, pause=0.03)
        lost, damaged = supervised.wait_for_fault(2 * number, 30), supervised.wait_for_fault(2 * number + 1, 30)
        assert (lost.cause, lost.action) == ("host", "restarted")
        assert (damaged.cause, damaged.action, damaged.step) == ("storage", "continued", good)
        assert named in damaged.what
        assert f"step {bad}" in damaged.what
        assert not folder.exists() or verify(folder) == []  # it may have been saved again by now
        assert list(folder.parent.glob(f"refused-{folder.name}*/why.json"))
    with supervised:
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert len(supervised.faults) == 2 * len(damages)
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_a_run_that_dies_during_a_save_always_has_an_intact_checkpoint(tmp_path: Path) -> None:
    """Fault `crash-in-save`: the disk is so slow that something is always being written or deleted."""
    rng = random.Random(0)
    supervised = start_run(tmp_path / "run", "train.steps=200", "checkpoint.every=5", disk_seconds="0.05")
    for _ in range(4):
        with supervised:
            wait_for_checkpoints(supervised.run, 1, after=max(complete_steps(supervised.run.checkpoints), default=0))
            time.sleep(rng.uniform(0.0, 0.6))
            kill_supervisor(supervised)
        folder = newest_checkpoint(supervised.run)
        assert verify(folder) == []
        starts = len(supervised.events(0, "ready"))
        supervised = resume_run(supervised.run, disk_seconds="0.05")
        supervised.wait_for_events(0, "ready", starts + 1)
        last = resumes(supervised.run)[-1]
        assert (last["tier"], last["from_step"], last["refused"]) == ("disk", int(folder.name[5:]), [])
    with supervised:
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert not list(supervised.run.checkpoints.glob(".*.draft"))
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for one and a half checkpoints, to mount as the run's checkpoint folder."""
    with mounted(tmp_path / "disk", "size=600k") as folder:
        yield folder


def test_a_disk_that_is_full_or_read_only_costs_checkpoints_and_nothing_else(tmp_path: Path, small_disk: Path) -> None:
    """Fault `disk-full`."""
    with start_run(tmp_path / "run", "train.steps=600", "checkpoint.every=10", "checkpoint.memory=1") as supervised:
        subprocess.run(["mount", "--bind", str(small_disk), str(_make_folder(supervised.run.checkpoints))], check=True)
        try:
            full = supervised.wait_for_fault(0)
            assert (full.cause, full.action) == ("storage", "continued")
            assert "No space left on device" in full.what
            assert verify(newest_checkpoint(supervised.run)) == []
            remount(small_disk, "size=20m")
            wait_for_checkpoints(supervised.run, 1, after=max(complete_steps(supervised.run.checkpoints)))
            remount(supervised.run.checkpoints, "bind,ro")
            read_only = supervised.wait_for_fault(1)
            assert (read_only.cause, read_only.action) == ("storage", "continued")
            assert "Read-only file system" in read_only.what
            remount(supervised.run.checkpoints, "bind,rw")
            wait_for_checkpoints(supervised.run, 1, after=max(complete_steps(supervised.run.checkpoints)))
            remove_pause(supervised)
            assert supervised.wait() == EXIT_DONE
            assert verify(newest_checkpoint(supervised.run)) == []
        finally:
            subprocess.run(["umount", "-l", str(supervised.run.checkpoints)], check=True)
    assert supervised.attempts() == 1
    assert len(supervised.faults) == 2


def test_a_disk_that_stays_full_at_the_last_checkpoint_blames_nobody_and_exits_with_75(
    tmp_path: Path, small_disk: Path
) -> None:
    with start_run(tmp_path / "run", "train.steps=40", "checkpoint.every=10", "checkpoint.memory=1") as supervised:
        subprocess.run(["mount", "--bind", str(small_disk), str(_make_folder(supervised.run.checkpoints))], check=True)
        try:
            remove_pause(supervised)
            assert supervised.wait() == EXIT_AGAIN
            assert verify(newest_checkpoint(supervised.run)) == []
        finally:
            subprocess.run(["umount", "-l", str(supervised.run.checkpoints)], check=True)
    assert supervised.attempts() == 1
    assert {(each.cause, each.suspects, each.victims) for each in supervised.faults} == {("storage", (), ())}
    assert supervised.faults[-1].action == "stopped"


def _make_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_saves_longer_than_their_interval_do_not_overlap_and_the_run_waits_for_the_last(tmp_path: Path) -> None:
    """Fault `disk-slow`: a save takes over a second, and one is wanted every half second."""
    with start_run(tmp_path / "run", "train.steps=100", "checkpoint.every=10", disk_seconds="0.25") as supervised:
        assert supervised.wait() == EXIT_DONE
    saves = supervised.events(0, "checkpoint")
    assert [each["data"].get("failed") for each in saves] == [None] * len(saves)
    assert saves[-1]["step"] == 100
    assert saves[-1]["data"]["skipped"] > 0
    for one, other in pairwise(saves):
        assert other["time"] - other["data"]["seconds"] >= one["time"] - 0.2  # events are logged at the next step
    assert max(each["data"]["stall_seconds"] for each in saves) < 0.1
    assert supervised.faults == []
    assert verify(newest_checkpoint(supervised.run)) == []

"""The wall clock jumps by an hour and back during a run: nothing hangs, restarts or lasts less than nothing."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fault_run import assert_as_undisturbed, remove_pause, start_run
from tests.fault.harness import ROOT, lines, wait_for
from trimaran.core import EXIT_DONE
from trimaran.runs import LeaseHolder, LeaseWatch, RunDirectory

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, for a clock of its own"),
]

HOUR = 3600


class Clock:
    """The wall clock of all processes with this environment, a few seconds off."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "clock.so", folder / "clock-offset"
        source = Path(__file__).parent / "clock.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.jump(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Be so many seconds ahead of the real clock from now on."""
        fd = os.open(self._file, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, struct.pack("q", seconds), 0)
        os.close(fd)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(tmp_path)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)  # for processes that start from now on, not for this one
    return found


def durations(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number under a name that is a duration, with where it is."""
    if isinstance(tree, dict):
        for name, each in tree.items():
            is_duration = "seconds" in f"{path}.{name}" and isinstance(each, int | float)
            yield from [(f"{path}.{name}", each)] if is_duration else durations(each, f"{path}.{name}")
    if isinstance(tree, list):
        for each in tree:
            yield from durations(each, path)


def command(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "trimaran", *words, "--json"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, (words, done.stderr)
    return json.loads(done.stdout)


def assert_nothing_lasts_less_than_nothing(run: RunDirectory) -> None:
    files = [run.metrics, run.incidents, run.attempts, run.events(0), run.events(1)]
    for file in files:
        assert not [each for line in lines(file) for each in durations(line, file.name) if each[1] < 0]
    assert not [each for each in durations(command("watch", str(run.path)), "watch") if each[1] < 0]


def test_a_clock_that_jumps_by_an_hour_and_back_disturbs_nothing(tmp_path: Path, clock: Clock) -> None:
    with start_run(tmp_path / "run", "train.steps=260", "checkpoint.every=20") as supervised:
        supervised.wait_for_step(30)
        for offset in (HOUR, -HOUR, 0):
            clock.jump(offset)
            supervised.wait_for_step(supervised.step() + 30)
            assert isinstance(LeaseWatch(supervised.run).poll(), LeaseHolder)
            assert_nothing_lasts_less_than_nothing(supervised.run)
        assert supervised.incidents == []
        remove_pause(supervised)
        assert supervised.wait(120) == EXIT_DONE
    assert supervised.attempts() == 1
    times = [each["time"] for each in lines(supervised.run.metrics)]
    jumps = [round((new - old) / HOUR) for old, new in pairwise(times) if abs(new - old) > HOUR / 2]
    assert jumps == [1, -2, 1], "the ranks saw them"
    assert [each["step"] for each in lines(supervised.run.metrics)] == [*range(1, 261)]
    assert_nothing_lasts_less_than_nothing(supervised.run)
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_faults_are_found_and_stops_are_quick_while_the_clock_is_an_hour_back(tmp_path: Path, clock: Clock) -> None:
    with start_run(tmp_path / "run", "train.steps=100000", "checkpoint.memory=1") as supervised:
        supervised.wait_for_step(20)
        clock.jump(-HOUR)
        supervised.send_signal(1, signal.SIGKILL)
        assert supervised.wait_for_fault(0).cost["seconds_to_recover"] < 60
        supervised.wait_for_step(supervised.step() + 10)
        clock.jump(HOUR)
        supervised.wait_for_step(supervised.step() + 10)
        supervised.run.stop_request.touch()
        wait_for(lambda: len(supervised.incidents) == 2)
        clock.jump(-HOUR)
        assert supervised.wait(60) == 75
        stopped = supervised.incidents[-1]
        assert (stopped.cause, stopped.action) == ("preempted", "saved")
        assert 0 <= stopped.cost["seconds_to_stop"] < 60
    assert_nothing_lasts_less_than_nothing(supervised.run)
    assert [each.cause for each in supervised.incidents] == ["crash", "preempted"]

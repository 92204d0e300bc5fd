"""Two runs start from one warm fork server; a run with another environment does not; `trimaran warm --stop` ends it."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.e2e.test_train import TINY, lines, wait_for
from tests.environment import environment

pytestmark = pytest.mark.slow  # torch is imported twice, and four runs are made


class Warm:
    """The command line with a warm fork server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "runtime").mkdir(mode=0o700)

    def run(self, *arguments: str, **variables: str) -> str:
        own = environment(XDG_RUNTIME_DIR=str(self.folder / "runtime"), **variables)
        done = forked.run("trimaran", *arguments, cwd=self.folder, env=own, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def train(self, name: str, **variables: str) -> tuple[str, list[dict[str, Any]]]:
        """Return what a run of two steps prints, and its first event and its last."""
        more = ["--set", "train.steps=2", "--set", "train.sample.tokens=0", "--run-dir", str(self.folder / name)]
        printed = self.run("train", "--warm", *TINY, *more, **variables)
        return printed, lines(self.folder / name / "events" / "rank-0.jsonl")

    def status(self) -> dict[str, Any] | None:
        return json.loads(self.run("warm", "--list", "--json"))["warm"]


def test_runs_share_a_warm_fork_server_until_it_is_stopped(tmp_path: Path) -> None:
    warm = Warm(tmp_path)
    assert warm.status() is None
    first, events = warm.train("first", TRIMARAN_LANG="en")
    status = warm.status()
    assert status is not None
    server = psutil.Process(status["pid"])
    assert f"using the warm fork server (process {server.pid})" in first
    assert events[0]["data"]["fork_server"] == f"using the warm fork server (process {server.pid})"
    second, events = warm.train("second")
    assert f"using the warm fork server (process {server.pid})" in second
    assert events[-1]["kind"] == "done"
    assert (tmp_path / "first" / "metrics.jsonl").read_text().count('"step"') == 2
    losses = [[each["loss"] for each in lines(tmp_path / name / "metrics.jsonl")] for name in ("first", "second")]
    assert losses[0] == losses[1], "a fork of a process that has served a run is as good as new"
    assert warm.status()["forks"] == 2  # type: ignore[index]

    other, events = warm.train("third", NCCL_DEBUG="WARN")
    assert "the warm fork server is not used: it differs from this run in the variables NCCL_DEBUG" in other
    assert events[-1]["kind"] == "done"

    assert "ends" in warm.run("warm", "--stop")
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert "there is no warm fork server" in warm.run("warm", "--list")


def test_a_warm_fork_server_without_use_ends_by_itself(tmp_path: Path) -> None:
    warm = Warm(tmp_path)
    started = json.loads(warm.run("warm", "--minutes", "0.1", "--json"))["warm"]
    assert started["ends_after_seconds"] == 6
    server = psutil.Process(started["pid"])
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "runtime" / "trimaran" / "warm.socket").exists()

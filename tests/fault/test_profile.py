"""A live run is profiled with `trimaran profile` and SIGUSR1; it continues and ends normally."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.disks import mounted
from tests.fault.harness import ROOT, TINY, Supervised, wait_for
from trimaran.runs import RunDirectory, find_traces, last_step, request_file

pytestmark = pytest.mark.chaos

PAUSE = 0.1


def profile(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimaran", "profile", str(run), *options, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_a_live_run_is_profiled_and_ends_normally(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=200", pause=PAUSE) as run:
        wait_for(lambda: run.step() >= 3)
        done = profile(run.run.path, "--steps", "2", "--ranks", "all")
        assert done.returncode == 0, done.stdout + done.stderr
        traced = json.loads(done.stdout)
        assert [trace["steps"] for trace in traced["traces"]] == [traced["traces"][0]["steps"]] * 2
        assert all(trace["seconds"] > 2 * PAUSE for trace in traced["traces"])
        assert all(trace["idle"] > 1.5 * PAUSE for trace in traced["traces"])  # the pause counts as idle
        (memory,) = json.loads(profile(run.run.path, "--memory", "--steps", "1").stdout)["memory"]
        assert memory["kinds"]["parameters"] > 0
        before = run.step()
        run.process.send_signal(signal.SIGUSR1)
        text = wait_for(lambda: run.run.ranks_shown.exists() and run.run.ranks_shown.read_text())
        heads = [line for line in text.splitlines() if line.startswith("rank ")]
        assert [line.split()[1] for line in heads] == ["0", "1"]
        assert all("MiB resident" in line for line in heads)
        calls = text.count("in report_section_and_fail") + text.count("in _run_steps")
        assert calls >= 2  # where both main threads are
        assert wait_for(lambda: run.step() > before + 3)
        assert not request_file(run.run).exists()
        assert run.process.wait(60) == 0
        assert run.faults == []
    merged = json.loads(profile(run.run.path, "--merge").stdout)
    assert merged["ranks"] == [0, 1]
    assert Path(merged["merged"]).stat().st_size > 1000
    assert len(find_traces(run.run)) == 1


def test_the_command_that_trains_prints_what_its_ranks_do(tmp_path: Path) -> None:
    settings = [f"--set={each}" for each in (*TINY, "cluster=2xcpu", "train.steps=100000")]
    command = [sys.executable, "-m", "trimaran", "train", *settings, f"--run-dir={tmp_path / 'run'}"]
    with (tmp_path / "shown").open("w+") as shown:
        process = subprocess.Popen(command, stdout=shown, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            wait_for(
                lambda: (tmp_path / "run" / "metrics.jsonl").exists() and last_step(RunDirectory(tmp_path / "run"))
            )
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda: "rank 1 on " in (tmp_path / "shown").read_text())
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 75
        finally:
            process.kill()
    text = (tmp_path / "shown").read_text()
    assert text.index("rank 0 on ") < text.index("rank 1 on ")


def test_a_stopped_rank_does_not_answer_and_stays_stopped(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=400", "faults.hang_seconds=60", pause=PAUSE) as run:
        wait_for(lambda: run.step() >= 3)
        pid = run.pid(1)
        os.kill(pid, signal.SIGSTOP)
        run.process.send_signal(signal.SIGUSR1)
        text = wait_for(lambda: run.run.ranks_shown.exists() and run.run.ranks_shown.read_text())
        assert "rank 1 does not answer" in text
        assert "stopped by a signal" in text
        assert text.startswith("rank 0 on ")
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        os.kill(pid, signal.SIGCONT)
        reached = run.step()
        assert wait_for(lambda: run.step() > reached + 2)


def test_profiling_a_finished_run_is_an_error(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=3") as run:
        assert run.process.wait(60) == 0
    done = profile(run.run.path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "D010"


def test_a_run_that_ends_within_the_profile_returns_the_steps_so_far(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=70", pause=PAUSE) as run:
        wait_for(lambda: run.step() >= 2)
        done = profile(run.run.path, "--steps", "100", "--ranks", "1")
        assert run.process.wait(60) == 0
    # The steps traced until the end are returned.
    assert done.returncode == 0
    (trace,) = json.loads(done.stdout)["traces"]
    assert trace["rank"] == 1
    assert trace["steps"][1] - trace["steps"][0] == min(99, 70 - trace["steps"][0])
    assert not request_file(run.run).exists()


def test_a_profile_on_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=400", ranks=1, pause=PAUSE) as run:
        wait_for(lambda: run.step() >= 3)
        with mounted(run.run.profiles, "size=16k") as full:
            done = profile(run.run.path, "--steps", "1")
            error = json.loads(done.stdout)["error"]
            assert (done.returncode, error["code"]) == (2, "D012")
            assert "No space left on device" in error["what"]
            wait_for(lambda: not list(full.iterdir()), 60)
        reached = run.step()
        assert wait_for(lambda: run.step() > reached + 2)

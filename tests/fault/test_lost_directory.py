"""Runs whose disk fills up, and runs whose directory is moved, replaced or deleted while they run."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.disks import fill, mounted
from tests.environment import environment
from tests.fault.harness import SECONDS, TINY, Supervised, lines, wait_for
from tests.runs import new_run
from trimaran.app import RunState, run_and_show, summarise
from trimaran.checkpoint import complete_steps, verify
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, UserError
from trimaran.launch import start_local
from trimaran.runs import RunDirectory, create_run, lock_directory, read_attempts, read_incidents, take_lease

ENDLESS = ("train.steps=100000", "checkpoint.every=10")


def steps_of(run: RunDirectory) -> list[int]:
    text = run.metrics.read_text()
    assert text.endswith("\n")
    return [each["step"] for each in lines(run.metrics)]


def assert_saved(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint, which must be complete, and the last step that was trained."""
    newest = max(complete_steps(run.checkpoints))
    assert verify(run.checkpoints / f"step-{newest:08d}") == []
    assert steps_of(run)[-1] == newest
    return newest


@pytest.mark.chaos
def test_a_full_disk_leaves_one_incident_and_complete_metrics(tmp_path: Path) -> None:
    """Fault `disk-full`: the run directory is on the full disk."""
    with mounted(tmp_path / "disk", "size=48m") as disk:
        settings = ("train.steps=120", "checkpoint.every=5", "train.save=false")
        with Supervised.start(disk / "run", *settings, ranks=1, pause=0.03) as supervised:
            supervised.wait_for_step(12)
            fill(disk / "filler")
            full = supervised.wait_for_fault(0)
            assert (full.cause, full.action) == ("storage", "continued")
            assert "No space left on device" in full.what
            wait_for(
                lambda: "kept in memory" in supervised.faults[0].what and "checkpoint" in supervised.faults[0].what
            )
            time.sleep(1.0)  # more steps whose metrics do not fit
            (disk / "filler").unlink()
            assert supervised.wait() == EXIT_DONE
        run = supervised.run
        (incident,) = supervised.faults
        assert incident.id == full.id
        assert incident.what.endswith("the metrics are complete again")
        assert steps_of(run) == list(range(1, 121))
        assert assert_saved(run) == 120
        for path in (run.events(0), run.incidents, run.attempts):
            assert path.read_text().endswith("\n")
        assert not run.reserve.exists()
        assert supervised.attempts() == 1
        shown = io.StringIO()
        state = RunState(run)
        state.refresh()
        summarise(state, Console(file=shown, width=200))
        assert "No space left on device" in shown.getvalue()
        assert "the metrics are complete again" in shown.getvalue()


def test_a_moved_run_ends_with_a_checkpoint_in_its_new_place(tmp_path: Path) -> None:
    """Fault `run-directory-moved`. No supervisor can start in the new place before the first one has ended."""
    old, new = tmp_path / "run", RunDirectory(tmp_path / "elsewhere")
    with Supervised.start(old, *ENDLESS, ranks=1, pause=0.02) as supervised:
        supervised.wait_for_step(12)
        supervised.process.send_signal(signal.SIGSTOP)  # so that it has not noticed the move yet
        old.rename(new.path)
        with pytest.raises(UserError, match="S020: this run is already running"):
            take_lease(new)  # as a second supervisor does
        supervised.process.send_signal(signal.SIGCONT)
        assert supervised.wait() == EXIT_AGAIN
    assert not old.exists()
    saved = assert_saved(new)
    assert steps_of(new) == list(range(1, saved + 1))
    (incident,) = (each for each in read_incidents(new) if each.cause == "storage")
    assert (incident.cause, incident.action) == ("storage", "saved")
    assert incident.what == f"the run directory was moved to {new.path} while the run was running"
    assert read_attempts(new).over == EXIT_AGAIN
    assert not any("/proc/self" in each.read_text(errors="replace") for each in new.path.rglob("*.jsonl"))


@pytest.mark.chaos
def test_a_run_whose_place_is_taken_by_another_does_not_touch_it(tmp_path: Path) -> None:
    old, new = tmp_path / "run", RunDirectory(tmp_path / "elsewhere")
    with Supervised.start(old, *ENDLESS, ranks=1, pause=0.02) as first:
        first.wait_for_step(12)
        recipe, plan = first.run.read_recipe(), first.run.read_plan()
        old.rename(new.path)
        create_run(old, recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 40})}), plan)
        with Supervised.again(RunDirectory(old)) as second:
            assert first.wait() == EXIT_AGAIN
            assert second.wait() == EXIT_DONE
    saved = assert_saved(new)
    (incident,) = (each for each in read_incidents(new) if each.cause == "storage")
    assert "and there is another one at its path" in incident.what
    assert steps_of(RunDirectory(old)) == list(range(1, 41))
    assert [each for each in read_incidents(RunDirectory(old)) if each.cause == "storage"] == []
    assert max(complete_steps(RunDirectory(old).checkpoints)) == 40
    with Supervised.again(new, pause=0.02) as third:
        wait_for(lambda: steps_of(new)[-1] > saved)
        third.process.send_signal(signal.SIGTERM)
        assert third.wait() == EXIT_AGAIN


@pytest.mark.chaos
def test_a_deleted_run_directory_is_a_fault_with_a_code(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Supervised.start(path, *ENDLESS, ranks=1, pause=0.02, extra={}) as supervised:
        supervised.wait_for_step(12)
        left = supervised.processes()
        wait_for(lambda: (shutil.rmtree(path, ignore_errors=True), not path.exists())[1])
        assert supervised.wait() == 1
    assert not path.exists()
    wait_for(lambda: not any(each.is_running() and each.status() != "zombie" for each in left), 10)


def train(path: Path, *settings: str) -> "subprocess.Popen[str]":
    arguments = [word for each in (*TINY, "cluster=1xcpu", *settings) for word in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--no-check", "--run-dir", str(path), *arguments]
    own = {"OMP_NUM_THREADS": "1", "TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "0.02"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**own))


@pytest.mark.chaos
def test_the_command_tells_where_its_run_went(tmp_path: Path) -> None:
    process = train(tmp_path / "run", *ENDLESS)
    wait_for(lambda: len(lines(tmp_path / "run" / "metrics.jsonl")) > 10)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (EXIT_AGAIN, "")
    assert f"the run directory was moved to {tmp_path / 'elsewhere'} while the run was running" in out
    assert "stopping with a checkpoint there" in out
    assert f"run   {tmp_path / 'elsewhere'}" in out
    assert f"resume {tmp_path / 'elsewhere'}" in out


@pytest.mark.chaos
def test_ranks_of_torchrun_stop_with_a_checkpoint_in_the_new_place(tmp_path: Path) -> None:
    path, new = tmp_path / "run", RunDirectory(tmp_path / "elsewhere")
    arguments = [word for each in (*TINY, *ENDLESS) for word in ("--set", each)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trimaran"]
    command += ["train", "--no-check", "--run-dir", str(path), *arguments]
    own = environment(OMP_NUM_THREADS="1")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own)
    wait_for(lambda: len(lines(path / "metrics.jsonl")) > 10)
    path.rename(new.path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"the run directory was moved to {new.path} while the run was running; stopping" in out
    assert "exitcode  : 75" in out
    assert not path.exists()
    assert_saved(new)


@pytest.mark.chaos
def test_the_command_tells_that_its_run_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = train(path, *ENDLESS)
    wait_for(lambda: len(lines(path / "metrics.jsonl")) > 10)
    wait_for(lambda: (shutil.rmtree(path, ignore_errors=True), not path.exists())[1])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("D007: the run directory was deleted while the run was running\n")
    assert not path.exists()


def test_the_second_of_two_resumes_reports_that_the_run_is_running(tmp_path: Path) -> None:
    """Both have found the run free and start a supervisor; the second one's is refused by the lease."""
    run = new_run(tmp_path / "run")
    with take_lease(run):
        with pytest.raises(UserError) as refused:
            run_and_show(run, Console(file=io.StringIO()), as_json=False, quiet=True)
        assert refused.value.code == "S020"
        assert f"process {os.getpid()} on" in refused.value.what
        started = start_local(run)
        assert started.wait(SECONDS) == EXIT_USER


def test_one_directory_has_one_supervisor_even_if_its_lease_is_deleted(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with take_lease(run):
        # The thread that renews the lease may write into the folder while it is deleted.
        wait_for(lambda: (shutil.rmtree(run.lease, ignore_errors=True), not run.lease.exists())[1])
        with pytest.raises(UserError, match="S020"):
            take_lease(run, lock_seconds=0.1)
        run.path.rename(tmp_path / "moved")
        with pytest.raises(BlockingIOError):
            lock_directory(RunDirectory(tmp_path / "moved"))
    take_lease(RunDirectory(tmp_path / "moved")).release()

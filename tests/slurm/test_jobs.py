"""Runs on a real Slurm cluster of three virtual nodes: to the end, and through what happens to jobs on the way.

Each disturbed run must end with the weights of an undisturbed one, bit for bit, and with the same loss of each step,
so that each step has seen the same samples once.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.elastic_runs import assert_as_one_size
from tests.fault.harness import lines, wait_for
from tests.slurm.cluster import NEEDS_SLURM, SlurmCluster
from tests.slurm.runs import STEPS, SlurmRun, environment, make_request
from trimaran.data import cache_folder, prepare
from trimaran.runs import RunDirectory, create_run, read_incidents

pytestmark = [pytest.mark.slow, NEEDS_SLURM]
HOSTILE = "a b'c\"d$(touch x)`touch y`;#&é%j"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as running:
        yield running


@pytest.fixture(autouse=True)
def _job_environment(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have sbatch pass the pause of each step to the job; afterwards end all jobs and get all nodes back."""
    for name, value in environment(cluster).items():
        monkeypatch.setenv(name, value)
    (cluster.folder / "bad-nodes.jsonl").unlink(missing_ok=True)
    yield
    cluster.ask("scancel", "--user=root", check=False)
    cluster.restore()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The same run on this machine, without Slurm."""
    return train_here(tmp_path_factory.mktemp("undisturbed") / "run")


def train_here(path: Path, *settings: str) -> RunDirectory:
    request = make_request(path, *settings)
    prepare(request.recipe.data, cache=cache_folder(os.environ))
    run = create_run(request.run_dir, request.recipe, request.plan)
    command = [sys.executable, "-m", "trimaran.launch", str(run.path), "--no-check"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run


def assert_equal(run: RunDirectory, undisturbed: RunDirectory, *, steps: int = STEPS) -> None:
    """Fail unless both runs have made the same steps with the same losses, and have the same weights, bit for bit."""
    ours, theirs = ([(each["step"], each["loss"]) for each in lines(one.metrics)] for one in (run, undisturbed))
    assert ours == theirs
    assert [step for step, _ in ours] == [*range(1, steps + 1)]
    found, wanted = (load_file(each.model / "model.safetensors") for each in (run, undisturbed))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if (found[name] != wanted[name]).any()] == []


def submit(cluster: SlurmCluster, path: Path, **site: Any) -> SlurmRun:
    return SlurmRun.submit(cluster, make_request(path, site={"time": "10"} | site))


def test_a_run_is_submitted_and_done(cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory) -> None:
    request = make_request(tmp_path / HOSTILE, name=HOSTILE, site={"time": "10"})
    run = SlurmRun.submit(cluster, request)
    assert [each.error for each in run.target.check(request, request.site)] == [None] * 5
    assert run.wait("running").native == "RUNNING"
    end = run.wait("done")
    assert (end.native, end.exit_code, end.reason) == ("COMPLETED", 0, "all steps are done")
    assert end.nodes == ("n1", "n2")
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", run.id)
    assert_equal(run.run, undisturbed)
    assert not {"x", "y"} & {each.name for each in (tmp_path / HOSTILE / "launch").iterdir()}
    (log,) = (run.run.path / "logs").glob("slurm-*.log")
    assert log.name == f"slurm-{run.id}.log"


@pytest.mark.parametrize("how", ["signal", "requeue"])
def test_a_preempted_run_saves_and_goes_on(
    how: str, cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory
) -> None:
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(5)
    if how == "signal":
        cluster.ask("scancel", "--signal=USR1", "--batch", run.id)
    else:
        cluster.ask("scontrol", "requeue", run.id)
    assert run.wait("queued").native == "PENDING"
    saved = run.step()
    assert 5 <= saved < STEPS
    run.wait("done")
    assert cluster.job(run.id)["Restarts"] == "1"
    assert run.resumes() == [saved], "no step was lost"
    assert_equal(run.run, undisturbed)


def test_a_run_goes_on_after_its_time_limit(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_TEST_PAUSE", "4")  # Slurm looks at time limits every 30 s
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(2)
    cluster.ask("scontrol", "update", f"JobId={run.id}", "TimeLimit=1")
    run.wait("queued")
    run.remove_pause()
    saved = run.step()
    assert 2 <= saved < STEPS
    cluster.ask("scontrol", "update", f"JobId={run.id}", "TimeLimit=10")
    run.wait("done")
    assert run.resumes() == [saved], "no step was lost"
    assert_equal(run.run, undisturbed)


@pytest.mark.parametrize("lost", ["slurmd", "node"])
def test_a_run_goes_on_without_a_lost_node(
    lost: str,
    cluster: SlurmCluster,
    tmp_path: Path,
    undisturbed: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIMARAN_TEST_PAUSE", "3")  # Slurm takes a while to notice
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(2)
    if lost == "slurmd":
        cluster.kill_slurmd("n2")
    else:
        cluster.lose_node("n2")
    run.wait("queued")
    run.remove_pause()
    saved = run.step()
    end = run.wait("done")
    assert cluster.job(run.id)["Restarts"] == "1"
    assert end.nodes == ("n1", "n3")
    assert lost == "node" or run.resumes() == [saved], "ranks outlive a slurmd, and save when Slurm ends the job"
    assert_equal(run.run, undisturbed)


def test_a_run_leaves_a_drained_node_when_it_is_asked_to_save(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory
) -> None:
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(5)
    cluster.ask("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    before = run.step()
    run.wait_for_step(before + 2)  # Slurm leaves a job alone on a node that drains
    cluster.ask("scancel", "--signal=USR1", "--batch", run.id)
    run.wait("queued")
    assert run.wait("done").nodes == ("n2", "n3")
    assert_equal(run.run, undisturbed)


def test_a_run_without_progress_ends_with_the_reason_in_the_comment(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_TEST_PLUGIN", "tests.fault.plugin")
    monkeypatch.setenv("TRIMARAN_TEST_FAULT", "exit:1:3")
    run = submit(cluster, tmp_path / "run")
    end = run.wait("failed")
    assert (end.native, end.exit_code) == ("FAILED", 93)
    assert "no new step in 3 starts" in end.reason
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", run.id)
    assert f"Comment={end.reason[:60]}" in cluster.ask("scontrol", "show", "job", run.id)
    forgotten = replace(run.job, native_id="99999", details={"jobs": ["99999"]})
    assert run.target.state(forgotten).state == "unknown"


def test_a_configuration_error_ends_the_job(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/mine")
    end = submit(cluster, tmp_path / "run").wait("failed")
    assert (end.native, end.exit_code) == ("FAILED", 2)
    assert "configuration error" in end.reason


def test_a_stopped_run_is_not_requeued_and_can_be_submitted_again(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory
) -> None:
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(5)
    run.target.stop(run.job)
    end = run.wait("stopped", "queued")
    assert (end.state, end.exit_code) == ("stopped", 75)
    assert end.reason.startswith("stopped on request")
    saved = run.step()
    native_id, details = run.target.submit_again(run.job)
    run.job = replace(run.job, native_id=native_id, details=details)
    run.wait("done")
    assert run.resumes() == [saved], "no step was lost"
    assert_equal(run.run, undisturbed)


def test_a_cancelled_run_saves_and_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = submit(cluster, tmp_path / "run")
    run.wait_for_step(5)
    cluster.ask("scancel", run.id)
    assert run.wait("stopped").native == "CANCELLED"
    time.sleep(3)
    assert run.state().native == "CANCELLED"
    assert read_incidents(run.run)[-1].action == "saved"


@pytest.mark.parametrize("chain", ["array", "singleton"])
def test_a_chain_goes_on_in_its_next_job_and_ends_with_the_run(
    chain: str, cluster: SlurmCluster, tmp_path: Path, undisturbed: RunDirectory
) -> None:
    run = submit(cluster, tmp_path / "run", chain=chain, chain_jobs=3)
    run.wait_for_step(5)
    first = f"{run.id}_1" if chain == "array" else run.id
    cluster.ask("scancel", "--signal=USR1", "--batch", first, check=False)  # an array's job is signalled with an error
    run.wait("done")
    jobs = [f"{run.id}_{number}" for number in (1, 2, 3)] if chain == "array" else run.job.details["jobs"]
    ends = [cluster.wait_for_state(job, ["FAILED", "COMPLETED", "CANCELLED"]) for job in jobs]
    assert [end["JobState"] for end in ends] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert ends[0]["ExitCode"] == "75:0"
    assert_equal(run.run, undisturbed)


def test_a_stopped_chain_saves_and_ends(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = submit(cluster, tmp_path / "run", chain="array", chain_jobs=3)
    run.wait_for_step(5)
    run.target.stop(run.job)
    end = run.wait("stopped", "done")
    assert (end.native, end.exit_code) == ("FAILED", 75)
    assert read_incidents(run.run)[-1].action == "saved"
    assert not cluster.ask("squeue", "--noheader")


def test_torchrun_saves_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    steps = "train.steps=400"  # no pause is added to the ranks of torchrun
    request = make_request(tmp_path / "run", steps, site={"time": "10", "runner": "torchrun"})
    run = SlurmRun.submit(cluster, request)
    run.wait_for_step(5)
    cluster.ask("scancel", "--signal=USR1", "--batch", run.id)
    run.wait("queued")
    saved = run.step()
    run.wait("done")
    assert cluster.job(run.id)["Restarts"] == "1"
    assert run.resumes() == [saved], "no step was lost"
    assert_equal(run.run, train_here(tmp_path / "undisturbed", steps), steps=400)


def wait_for_sizes(run: SlurmRun, *expected: int, seconds: float = 120.0) -> None:
    """Return when the run has started with each number of ranks, and has made a step with the last one."""
    try:
        wait_for(lambda: run.attempts() == [*expected] and len(run.resumes()) == len(expected) - 1, seconds)
        before = run.step()
        wait_for(lambda: run.step() > before, seconds)
    except AssertionError as error:
        raise AssertionError(f"{run.attempts()} at step {run.step()}\n{run.log()}") from error


def test_an_elastic_run_shrinks_in_its_job_and_grows_with_another_one(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm takes a lost node out of its job, and gives it no other: a second job of the same script joins the run."""
    monkeypatch.setenv("TRIMARAN_TEST_PAUSE", "1.0")
    settings = ("faults.ranks=[1, 2]", "train.steps=200", "checkpoint.every=50")
    run = SlurmRun.submit(cluster, make_request(tmp_path / "run", *settings, site={"time": "10"}))
    wait_for_sizes(run, 2)
    first, lost = run.state().nodes
    cluster.lose_node(lost)
    wait_for_sizes(run, 2, 1)
    wait_for(lambda: cluster.job(run.id)["NodeList"] == first, 60)
    cluster.start_slurmd(lost)
    wait_for(lambda: cluster.states().count("idle") == 2, 60)
    assert cluster.job(run.id)["NodeList"] == first, "Slurm does not give the node back"
    folder = run.run.path / "launch"
    more = cluster.ask("sbatch", "--parsable", "--nodes=1", f"--chdir={folder}", str(folder / "job.sbatch"))
    wait_for_sizes(run, 2, 1, 2)
    cluster.ask("scancel", "--signal=USR1", "--batch", more)  # preempted: its node leaves, and returns
    wait_for_sizes(run, 2, 1, 2, 1)
    wait_for_sizes(run, 2, 1, 2, 1, 2)
    run.remove_pause()
    run.wait("done")
    assert cluster.wait_for_state(more, ["COMPLETED"])["Restarts"] == "1"
    assert cluster.job(run.id)["Restarts"] == "0"
    found = [(each.cause, each.action) for each in read_incidents(run.run) if each.cause in ("host", "preempted")]
    assert found == [("host", "resized"), ("preempted", "resized")]
    assert_as_one_size(run.run, tmp_path / "undisturbed")

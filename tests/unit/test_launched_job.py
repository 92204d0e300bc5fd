"""What becomes of a launch that fails on the way, and the exit code of a job that is over."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.app import exit_code, main
from trimaran.launch import JobRecord, JobState, SlurmSite, State, site_section
from trimaran.runs import AttemptLog, RunDirectory

LAUNCH = ["launch", "--on", "slurm", "--no-check", "--set", "cluster=2x1xcpu", "--set", "train.steps=4"]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user on whose machine `sbatch` refuses every job."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    write_sbatch(tmp_path, "echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    return tmp_path


def write_sbatch(folder: Path, script: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "sbatch").chmod(0o755)


def test_a_refused_submission_says_where_the_files_are_and_how_to_submit_them(user: Path, capsys: Any) -> None:
    assert main([*LAUNCH, "--run-dir", "a run"]) == 2
    said = capsys.readouterr().err
    assert re.findall(r"^(L\d+): ", said, re.MULTILINE) == ["L037", "L009"]
    by_hand, again = re.findall(r"by hand: (.*); or remove them and launch again: (.*)$", said, re.MULTILINE)[0]
    write_sbatch(user, "cat $1 > submitted")
    subprocess.run(["sh", "-c", by_hand], check=True)
    assert "trimaran.launch" in (user / "a run" / "launch" / "submitted").read_text()
    subprocess.run(["sh", "-c", again], check=True)
    assert not (user / "a run").exists()
    assert not list((user / "XDG_STATE_HOME").rglob("*.json"))


def test_nothing_is_submitted_if_the_job_could_not_be_recorded(
    user: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    assert main([*LAUNCH, "--run-dir", "run"]) == 2
    assert capsys.readouterr().err.startswith("L015: ")
    assert not (user / "run").exists()


def test_a_folder_with_other_files_leaves_no_run_behind(user: Path, capsys: Any) -> None:
    (user / "files").mkdir()
    (user / "files" / "job.sbatch").write_text("mine")
    assert main([*LAUNCH, "--run-dir", "run", "--out", "files"]) == 2
    assert capsys.readouterr().err.startswith("L006: ")
    assert not (user / "run").exists()


def record(submitted: float) -> JobRecord:
    return JobRecord(id="x-1", target="x", name="x", native_id="1", run_dir="", folder="", submitted=submitted,
                     host="", num_nodes=1, ranks_per_node=1)  # fmt: skip


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose supervisor has ended with 75."""
    run = new_run(tmp_path_factory.mktemp("stopped") / "run")
    log = AttemptLog(run)
    log.begin(world_size=1)
    log.over(75, "stopped")
    return run


@pytest.mark.parametrize(
    ("state", "code", "before", "since"),
    [
        ("done", 0, 0, 0),
        ("stopped", 0, 75, 75),  # Slurm has cancelled it
        ("stopped", None, 75, 75),  # Kubernetes has suspended it
        ("stopped", 75, 75, 75),
        ("failed", 2, 2, 2),
        ("failed", 93, 93, 93),
        ("failed", 127, 127, 75),  # a resumed job that could not start; what the run says is of the job before
        ("failed", 143, 143, 75),  # killed after it had saved
        ("failed", None, 1, 75),
    ],
)
def test_the_exit_code_is_that_of_this_job_and_not_of_one_before(
    state: State, code: int | None, before: int, since: int, stopped_run: RunDirectory
) -> None:
    seen = JobState(state=state, exit_code=code)
    later, earlier = record(9e9), record(0.0)
    assert exit_code(stopped_run, later, seen) == before
    assert exit_code(None, later, seen) == before
    assert exit_code(stopped_run, earlier, seen) == since


def test_a_text_of_the_site_may_look_like_a_number() -> None:
    settings = ["time=10", "memory=0", "account=007", "exclusive=false", "setup=[module load a]", 'partition="a b"[0]']
    with pytest.raises(Exception, match="partition"):
        site_section({}, "slurm", SlurmSite, settings, where="file")
    site = site_section({}, "slurm", SlurmSite, settings[:-1], where="file")
    assert (site.time, site.memory, site.account, site.exclusive) == ("10", "0", "007", False)
    assert site.setup == ("module load a",)

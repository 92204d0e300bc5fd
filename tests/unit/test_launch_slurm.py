"""The batch script for Slurm, what Slurm's answers mean, and how a job ends; without a cluster."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from tests.slurm.runs import make_request
from trimaran.core import UserError
from trimaran.launch import (
    LaunchRequest,
    SlurmSite,
    SlurmTarget,
    batch_options,
    find_end,
    measured_stop_time,
    parse_fields,
    record_end,
    script_lines,
    stands_for_chain,
    time_seconds,
)
from trimaran.runs import AttemptLog, Journal, add_observation, observe

HOSTILE = "a b'c\"d$(touch x)`touch y`;#&é%j"
ECHO = 'echo "$(basename "$0")" "$@" >> "$CALLS"\n'


def request_of(tmp_path: Path, *settings: str, **fields: Any) -> LaunchRequest:
    return make_request(tmp_path / "run", *settings, **fields)


def options_of(script: str) -> list[str]:
    """Return the options in the lines #SBATCH, as sbatch reads them: quotes and backslashes, nothing else."""
    found = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in found for word in shlex.split(line)]


def test_the_script_is_valid_shell_and_the_same_each_time(tmp_path: Path) -> None:
    request = request_of(tmp_path, site={"time": "1-00:00:00", "setup": ["module load cuda"]})
    script = script_lines(request)
    assert script == script_lines(request)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for option in ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--time=1-00:00:00"):
        assert option in options_of(script)
    assert "module load cuda" in script.splitlines()


@pytest.mark.parametrize("name", [HOSTILE, "back\\slash", "trailing ", "-rf"])
@pytest.mark.parametrize("runner", ["supervisor", "torchrun"])
def test_hostile_names_are_quoted(name: str, runner: str, tmp_path: Path) -> None:
    """Run the script with commands that only write down their arguments."""
    site = {"runner": runner, "container_image": f"image {HOSTILE}"}
    request = make_request(tmp_path / name, name=name, site=site)
    script = script_lines(request)
    assert options_of(script)[: len(batch_options(request))] == batch_options(request)
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    calls.touch()
    for tool in ("srun", "scontrol", "scancel"):
        (tools / tool).write_text(f'#!/bin/bash\nprintf "%s\\0" {tool} "$@" >> "$CALLS"\nprintf "\\n" >> "$CALLS"\n')
        (tools / tool).chmod(0o700)
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    inside = tmp_path / "inside"
    inside.mkdir()
    subprocess.run(["bash", "-c", script], env=variables, cwd=inside, check=False, timeout=60)
    assert list(inside.iterdir()) == []
    words = [line.split("\0") for line in calls.read_text().split("\n")]
    (started,) = [line for line in words if line[0] == "srun" and "--label" in line]
    assert str(tmp_path / name) in started
    assert f"--container-image=image {HOSTILE}" in started


def test_a_path_with_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="L038"):
        script_lines(make_request(tmp_path / "a\nb"))


def test_names_of_the_site_with_blanks_or_quotes_are_refused() -> None:
    for field in ("partition", "account", "constraint", "exclude", "mail", "gres"):
        with pytest.raises(ValueError, match="only letters"):
            SlurmSite.model_validate({field: "a; touch x"})
    with pytest.raises(ValueError, match="one line"):
        SlurmSite(setup=("a\nb",))
    with pytest.raises(ValueError, match="time limit"):
        SlurmSite(time="tomorrow")


def test_no_value_of_a_secret_is_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-7f3a")
    files = SlurmTarget().render(request_of(tmp_path, secrets=("HF_TOKEN",)))
    assert not any("canary" in text for text in files.files.values())


def test_all_fields_of_the_site_reach_the_script(tmp_path: Path) -> None:
    site = {"partition": "gpu", "account": "llm", "qos": "high", "constraint": "h100&ib", "reservation": "r1",
            "exclude": "n[3,7]", "time": "4:00:00", "gres": "gpu:h100", "cpus_per_node": 96, "memory": "500G",
            "exclusive": False, "mail": "a@b.org", "options": ["--licenses=x:1"], "chain": "array",
            "chain_jobs": 5}  # fmt: skip
    request = request_of(tmp_path, cluster="2x8xH100", site=site, hosts=("n1", "n2"))
    found = options_of(script_lines(request, excluded="n[3,7]"))
    wanted = ["--partition=gpu", "--account=llm", "--qos=high", "--constraint=h100&ib", "--reservation=r1",
              "--exclude=n[3,7]", "--time=4:00:00", "--gres=gpu:h100:8", "--cpus-per-task=96", "--mem=500G",
              "--mail-user=a@b.org", "--licenses=x:1", "--array=1-5%1", "--nodelist=n1,n2"]  # fmt: skip
    assert set(wanted) <= set(found)
    assert "--exclusive" not in found
    assert "--gpus-per-node=8" in options_of(script_lines(request_of(tmp_path, cluster="2x8xH100")))


def test_an_elastic_run_asks_for_a_range_of_nodes_and_survives_a_lost_one(tmp_path: Path) -> None:
    script = script_lines(request_of(tmp_path, "faults.ranks=[2, 8]", cluster="2x2xcpu"))
    assert {"--nodes=1-4", "--no-kill"} <= set(options_of(script))
    assert "--ntasks-per-node=1" not in options_of(script), "Slurm would give it the fewest nodes"
    assert '--nodes=4 --start-nodes="$SLURM_NNODES"' in script, "nodes of another job may join"
    assert script.count("--start-nodes") == 1
    assert "--min-nodes=1" in script
    assert '--nodes="$SLURM_NNODES"' in script_lines(request_of(tmp_path, cluster="2x2xcpu"))


def test_the_lead_is_the_time_of_a_save_a_step_and_a_minute(tmp_path: Path) -> None:
    request = request_of(tmp_path, save_seconds=100.0)
    assert "100 s for a save (predicted) + 1 s for a step + 60 s = 161 s" in script_lines(request)
    assert "--signal=B:USR1@161" in options_of(script_lines(request))
    run = new_run(tmp_path / "measured")
    assert measured_stop_time(run.path) is None
    with Journal(run, 0) as journal:
        for seconds in (3.0, 30.5, 4.0):
            journal.event("checkpoint", step=1, seconds=seconds)
    known = measured_stop_time(run.path)
    assert known is not None
    assert known.lead_seconds == 31 + 60
    assert "--signal=B:USR1@91" in options_of(script_lines(make_request(run.path, save_seconds=100.0)))


def test_a_chain_of_jobs_is_submitted_job_by_job_under_a_name_of_the_run(tmp_path: Path) -> None:
    site = {"chain": "singleton", "chain_jobs": 3}
    one, other = (make_request(tmp_path / name, site=site) for name in ("one", "other"))
    assert list(SlurmTarget().render(one).submit) == [["sbatch", "job.sbatch"]] * 3
    names = [next(each for each in options_of(script_lines(request)) if "job-name" in each) for request in (one, other)]
    assert names[0] != names[1]
    assert "--dependency=singleton" in options_of(script_lines(one))


def test_times_are_read_as_slurm_writes_them() -> None:
    read = {text: time_seconds(text) for text in ("90", "10:30", "4:00:00", "2-12", "1-02:03:04", "UNLIMITED", "")}
    assert read == {"90": 5400, "10:30": 630, "4:00:00": 14400, "2-12": 216000, "1-02:03:04": 93784,
                    "UNLIMITED": None, "": None}  # fmt: skip


def test_fields_with_blanks_are_read() -> None:
    line = "JobId=7 JobName=a JobState=FAILED Comment=no new step in 3 starts; x=1 or so Power="
    assert parse_fields(line) == {"JobId": "7", "JobName": "a", "JobState": "FAILED",
                                  "Comment": "no new step in 3 starts; x=1 or so", "Power": ""}  # fmt: skip


def test_the_coordinator_has_the_last_word_on_how_a_job_ended(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    log = AttemptLog(run)
    log.begin(world_size=2)
    log.over(93, "no new step in 3 starts")
    assert find_end(run, code=137, since=time.time() - 5).code == 93
    later = find_end(run, code=75, since=time.time() + 60)
    assert later.code == 75, "what an earlier job wrote does not count"


def test_ranks_of_torchrun_say_how_they_ended(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        journal.event("stop", step=4)
    assert find_end(run, code=1, since=time.time() - 5).code == 75
    with Journal(run, 0) as journal:
        journal.event("done", step=10)
    assert find_end(run, code=0, since=time.time() - 5).code == 0


def test_killed_supervisors_start_again_until_three_starts_made_no_step(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    codes = []
    for _ in range(3):
        end = find_end(run, code=137, since=time.time())
        record_end(run, end, code=137, environ={"SLURM_JOB_ID": "7"})
        codes.append(end.code)
    assert codes == [75, 75, 93]


def test_the_job_asks_for_its_end_with_a_command(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    AttemptLog(run).over(75, "stopped with\na checkpoint")
    command = [sys.executable, "-m", "trimaran.launch.targets.slurm_end", str(run.path), "--code=75"]
    command += [f"--since={time.time() - 9:.0f}", "--asked=stop"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["75", "stopped on request; stopped with a checkpoint"]


def test_without_slurm_the_check_says_where_to_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = SlurmTarget().check(request_of(tmp_path), SlurmSite())
    assert check.error is not None
    assert check.error.code == "L030"


def test_the_guide_lists_every_field_of_the_site() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "slurm.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*?) \|$", guide, re.MULTILINE)
    fields = [(name, repr(each.default), each.description) for name, each in SlurmSite.model_fields.items()]
    assert [row for row in rows if row[0] in SlurmSite.model_fields] == fields


def test_one_job_stands_for_a_chain() -> None:
    def state(*states: str) -> str:
        jobs = [{"JobId": str(7 + number), "JobState": each} for number, each in enumerate(states)]
        best = min(jobs, key=stands_for_chain)
        return best["JobId"]

    assert state("FAILED", "RUNNING", "PENDING") == "8"
    assert state("FAILED", "PENDING", "PENDING") in ("8", "9")
    assert state("FAILED", "COMPLETED", "CANCELLED") == "8"
    assert state("FAILED", "FAILED", "CANCELLED") == "8"
    assert state("CANCELLED") == "7"


def test_nodes_known_to_be_bad_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMARAN_BAD_NODES", str(tmp_path / "bad.jsonl"))
    for node in ("n7", "n 8; touch x"):
        add_observation(tmp_path / "bad.jsonl", observe(node, "hardware", "ECC errors"))
    script = SlurmTarget().render(request_of(tmp_path, site={"exclude": "n[3-4]"})).files["job.sbatch"]
    assert "--exclude=n[3-4],n7" in options_of(script)

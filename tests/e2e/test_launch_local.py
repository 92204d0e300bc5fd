"""`trimaran launch` and `trimaran jobs` through the command, on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [
    "train.steps=4",
    "train.global_batch=4",
    "data.seq_len=16",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
]
SETTINGS = [word for each in SMALL for word in ("--set", each)]
CANARY = "hf_canary_4711"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config"),
                   "XDG_CACHE_HOME": str(Path.home() / ".cache"), "HF_TOKEN": CANARY, "OMP_NUM_THREADS": "1",
                   "PATH": "/usr/bin:/bin", "HOME": str(folder)}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "trimaran", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_a_run_is_launched_followed_to_its_end_and_listed(tmp_path: Path) -> None:
    done = command(tmp_path, "launch", "--on", "local", *SETTINGS, "--set", "cluster=1xcpu", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert (job["target"], job["exit"], job["step"], job["state"]["state"]) == ("local", 0, 4, "done")
    listed = json.loads(command(tmp_path, "jobs", "--json").stdout)["jobs"]
    assert [each["id"] for each in listed] == [job["id"]]
    shown = command(tmp_path, "jobs", job["name"]).stdout
    assert all(word in shown for word in ("follow", "stop", "resume", job["run_dir"]))
    written = [path for path in Path(job["run_dir"]).rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


@pytest.mark.parametrize("target", ["local", "ssh", "slurm", "ray", "sky"])
def test_a_dry_run_shows_the_files_and_writes_nothing(tmp_path: Path, target: str) -> None:
    words = ["launch", "--on", target, *SETTINGS, "--set", "cluster=2x2xcpu", "--dry-run", "--json"]
    words += ["--hosts", "a,b"] if target == "ssh" else []
    words += ["--run-dir", "/mnt/runs/tiny"] if target == "sky" else []
    done = command(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["main"] in answer["files"]
    assert answer["submit"]
    assert CANARY not in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state").exists()

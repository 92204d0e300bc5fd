"""`trimaran launch` and `trimaran jobs` through the command, on this machine."""

import json
from pathlib import Path

import pytest

from tests import forked
from tests.environment import environment
from trimaran.app import main

SMALL = [
    "train.steps=4",
    "train.global_batch=4",
    "data.seq_len=16",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
]
SETTINGS = [word for each in SMALL for word in ("--set", each)]
CANARY = "hf_canary_4711"
CACHE = str(Path.home() / ".cache")  # with the measured rates and the packed text of this machine


def variables(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose folders are below `folder`."""
    return {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_CACHE_HOME": CACHE, "HF_TOKEN": CANARY, "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin", "HOME": str(folder)}  # fmt: skip


def answer(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints, in this process."""
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables(tmp_path).items():
        monkeypatch.setenv(name, value)


def test_a_run_is_launched_followed_to_its_end_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "local", *SETTINGS, "--set", "cluster=1xcpu", "--wait", "--json"]
    done = forked.run("trimaran", *words, cwd=tmp_path, env=environment(**variables(tmp_path)), timeout=170)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert (job["target"], job["exit"], job["step"], job["state"]["state"]) == ("local", 0, 4, "done")
    listed = json.loads(answer("jobs", "--json", capsys=capsys))["jobs"]
    assert [each["id"] for each in listed] == [job["id"]]
    shown = answer("jobs", job["name"], capsys=capsys)
    assert all(word in shown for word in ("follow", "stop", "resume", job["run_dir"]))
    written = [path for path in Path(job["run_dir"]).rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


@pytest.mark.parametrize("target", ["local", "ssh", "slurm", "ray", "sky"])
def test_a_dry_run_shows_the_files_and_writes_nothing(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--on", target, *SETTINGS, "--set", "cluster=2x2xcpu", "--dry-run", "--json"]
    words += ["--hosts", "a,b"] if target == "ssh" else []
    words += ["--run-dir", "/mnt/runs/tiny"] if target == "sky" else []
    printed = answer(*words, capsys=capsys)
    shown = json.loads(printed)
    assert shown["folder"] is None
    assert shown["main"] in shown["files"]
    assert shown["submit"]
    assert CANARY not in printed
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state").exists()

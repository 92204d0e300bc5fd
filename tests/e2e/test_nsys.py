"""`trimaran profile --nsys`, with a stand-in for nsys that receives the real NVTX ranges of real ranks."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.nvtx_tool import build_nvtx_tool
from tests.runs import new_run
from trimaran.app import main
from trimaran.runs import MARKER, RunDirectory

ROOT = Path(__file__).parents[2]
TINY = ("train.global_batch=4", "data.seq_len=32", "checkpoint.every=10")
SETTINGS = tuple(f"--set={each}" for each in TINY)


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on the PATH, and work in an empty folder with a recipe."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.nvtx_tool.nsys "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    monkeypatch.setenv("STAND_IN_TOOL", str(build_nvtx_tool(tmp_path)))
    (tmp_path / "tiny.yaml").write_text("name: tiny\n")
    monkeypatch.chdir(tmp_path)
    return script


@pytest.mark.slow  # tests/dist/test_nvtx.py reads the same ranges with the same tool
@pytest.mark.parametrize("ranks", [1, 2])
def test_nsys_records_the_last_rank_of_a_short_run_and_its_phases_are_shown(
    ranks: int, nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = ranks - 1
    command = [
        "profile",
        "tiny.yaml",
        "--nsys",
        "--steps=2",
        f"--ranks={last}",
        *SETTINGS,
        f"--set=cluster={ranks}xcpu",
    ]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    run = RunDirectory(tmp_path / "runs" / "tiny-nsys")
    assert answer["files"] == [str(run.profiles / f"rank-{last}.nsys-rep")]
    events = [json.loads(line) for line in run.events(last).read_text().splitlines()]
    (made,) = [each["data"] for each in events if each["kind"] == "profile"]
    assert (made["what"], made["first"], made["last"]) == ("nvtx", 11, 12)
    (recorded,) = answer["nsys"]
    ranges = {row["text"]: row for row in recorded["ranges"]}
    assert recorded["rank"] == last
    assert ranges["forward"]["calls"] == ranges["backward layers.0"]["calls"] == 2
    phases = [row for row in ranges.values() if row["is_phase"]]
    assert sum(row["share"] for row in phases) == pytest.approx(1.0, abs=0.05)
    assert {row["text"] for row in phases} == {"data", "forward", "comm", "backward", "checkpoint", "optimizer"}
    assert not list(run.checkpoints.glob("step-*"))
    commands = run.agent_log.read_text().splitlines()[:ranks]
    assert [f" RANK={rank} " in line for rank, line in enumerate(commands)] == [True] * ranks


def test_a_dry_run_prints_the_command_of_each_rank_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run", world_size=2)
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "run", "--nsys", "--ranks=1", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    report = tmp_path / "runs" / f"{run.read_recipe().name}-nsys" / "profiles" / "rank-1.nsys-rep"
    assert planned["files"] == [str(report)]
    first, second = (shlex.split(each) for each in planned["commands"])
    assert {"RANK=0", "WORLD_SIZE=2", "CUDA_VISIBLE_DEVICES="} <= {*first}
    assert "profile" not in first
    start = second.index("profile") - 1
    assert Path(second[start]).name == "nsys"
    own = [sys.executable, "-m", "trimaran.train", str(report.parents[1])]
    options = ["--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--output={report}"]
    assert second[start + 1 :] == ["profile", *options, *own]
    assert first[-4:] == own
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_rank_that_fails_under_nsys_ends_the_others_and_is_named(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nsys.write_text("#!/bin/sh\nexit 3\n")
    assert main(["profile", "tiny.yaml", "--nsys", *SETTINGS, "--set=cluster=2xcpu"]) == 2
    assert "D019: rank 0 ended with exit code 3 under nsys" in capsys.readouterr().err


def test_a_machine_without_nsys_is_told_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["profile", str(run.path), "--nsys"]) == 2
    page = ROOT / "docs" / "codes" / "D018.md"
    assert capsys.readouterr().err in page.read_text()
    capsys.readouterr()
    for options in (["--dry-run"], ["--set=train.steps=3"], ["--nsys", "--merge"]):
        assert main(["profile", str(run.path), *options]) == 2
        assert capsys.readouterr().err.startswith("A001: ")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert (run.path / MARKER).exists()

"""The command `drill`: completion, its table and its exit codes. Real drills: `tests/fault/test_drill.py`."""

import json
from pathlib import Path

import pytest

from tests.runs import new_run
from trimaran.app import DrillResult, Drills, complete_target, open_console

PASSED = DrillResult(
    fault="kill 1",
    kind="kill",
    time=1000.0,
    detected_seconds=0.05,
    recovered_seconds=1.25,
    lost_steps=1,
    incident="i-0001",
    cause="crash",
    suspects=(1,),
    named=True,
    passed=True,
)
FAILED = DrillResult(fault="fill-disk", kind="fill-disk", time=1000.0, note="not noticed within 60 s")


def drills(path: Path, *results: DrillResult) -> Drills:
    found = Drills(new_run(path), None, None, open_console(stderr=True))
    found.results += results
    return found


def test_results_are_a_table_with_notes_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = drills(tmp_path / "run", PASSED, FAILED)
    some.skipped.append(("kill-loader 1", "the rank has no loader processes"))
    assert some.print_results(as_json=False) == 1
    _, kill, disk, note, left_out, _ = capsys.readouterr().out.splitlines()
    assert " ".join(kill.split()) == "kill 1 0.05 s 1.25 s 1 crash of rank 1 yes passed"
    assert " ".join(disk.split()) == "fill-disk - - - - no failed"
    assert note == "fill-disk: not noticed within 60 s"
    assert left_out == "kill-loader 1: left out: the rank has no loader processes"


def test_the_exit_code_says_whether_every_drill_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drills(tmp_path / "a", PASSED).print_results(as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], answer["drills"][0]["suspects"]) == (True, [1])
    assert drills(tmp_path / "b").print_results(as_json=True) == 1  # nothing was injected
    interrupted = drills(tmp_path / "c", PASSED)
    interrupted.interrupted = True
    assert interrupted.print_results(as_json=True) == 130


def test_runs_and_recipes_complete_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "tiny.yaml").touch()
    assert complete_target("runs/f") == ["runs/first"]
    assert complete_target("ti") == ["tiny.yaml"]

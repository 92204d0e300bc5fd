"""The life of a run: its timeline is that of its files, and the files of a target are those that a launch writes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from trimaran.app import main
from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.ui import FileText, Timeline, build_view, life_of, read_subject

START = 1_700_000_000.0


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that crashed once, was changed, and is done: the files as supervisor and ranks write them."""
    recipe = parse_recipe("train: {steps: 40, global_batch: 8}\ncluster: 2xcpu\n", name="x")
    made = create_run(tmp_path / "runs" / "twice", recipe, Plan(mesh=Mesh(dp_replicate=2), micro_batch=4))
    (made.path / "trimaran-run.json").write_text(json.dumps({"format": 1, "created": START, "pid": 1}))
    attempt: dict[str, Any] = {"world_size": 2, "host": "a", "pid": 1}
    write_lines(made.attempts, {"attempt": 0, "time": START + 1, **attempt},
                {"attempt": 0, "ended": START + 30, "how": "trouble", "step": 20},
                {"attempt": 1, "time": START + 31, **attempt},
                {"attempt": 1, "ended": START + 60, "how": "done", "step": 40},
                {"over": 0, "why": "all steps are done", "time": START + 61})  # fmt: skip
    event: dict[str, Any] = {"rank": 0, "data": {}}
    write_lines(made.events(0), event | {"kind": "start", "time": START + 2, "attempt": 0},
                event | {"kind": "ready", "time": START + 5, "attempt": 0},
                event | {"kind": "checkpoint", "time": START + 20, "step": 10, "attempt": 0, "data": {"seconds": 2.0}},
                event | {"kind": "start", "time": START + 32, "attempt": 1},
                event | {"kind": "ready", "time": START + 36, "attempt": 1},
                event | {"kind": "change", "time": START + 40, "step": 25, "attempt": 1,
                         "data": {"status": "applied", "patch": {"plan.comm.bucket_mb": 50}}},
                event | {"kind": "done", "time": START + 59, "step": 40, "attempt": 1})  # fmt: skip
    write_lines(made.incidents, {"id": "i-0001", "cause": "crash", "time": START + 30, "what": "rank 1 died",
                                 "cost": {"seconds_to_recover": 7.0}})  # fmt: skip
    return made


def test_the_timeline_is_that_of_the_runs_files(run: RunDirectory) -> None:
    life = life_of(run)
    spans = {(each.phase, each.label): (round(each.start, 3), round(each.end, 3)) for each in life.spans}
    assert spans["launch", "the run directory is created, ranks are started"] == (0.0, 1.0)
    assert spans["init", "start 1"] == (1.0, 5.0)
    assert spans["train", "start 1, to step 20"] == (5.0, 30.0)
    assert spans["init", "start 2"] == (31.0, 36.0)
    assert spans["train", "start 2, to step 40"] == (36.0, 60.0)
    assert spans["save", "checkpoint of step 10"] == (18.0, 20.0)
    assert spans["incident", "crash: rank 1 died"] == (30.0, 37.0)
    assert spans["adapt", 'applied: {"plan.comm.bucket_mb": 50}'] == (40.0, 40.0)
    assert (life.status, life.total_steps) == ("done", 40)
    assert life.seconds == pytest.approx(61.0)
    live = build_view("life", read_subject(None, str(run.path), None, (), ())).modes["live"]
    (timeline,) = (each for each in live.figures if isinstance(each, Timeline))
    assert timeline.rows == ("plan", "launch", "init", "train", "save", "incident", "adapt")
    assert live.sentences[0] == "The run is done."


def test_the_files_of_a_launched_run_are_shown_as_they_are(run: RunDirectory) -> None:
    folder = run.path / "launch"
    folder.mkdir()
    (folder / "run.sh").write_text("#!/bin/sh\nexec true\n")
    (folder / "recipe.yaml").write_text("name: x\n")
    assert life_of(run).files == {"run.sh": "#!/bin/sh\nexec true\n"}


@pytest.mark.parametrize(("target", "cluster"), [("local", "2xcpu"), ("local", "2x2xcpu"), ("k8s", "2x8xH100"),
                                                 *(slow((name, "2x8xH100")) for name in ("slurm", "ray", "ssh", "sky"))
                                                 ])  # fmt: skip
def test_the_files_of_a_target_are_byte_equal_to_those_of_a_launch(
    target: str, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("name: seen\ntrain: {steps: 4, global_batch: 32}\ndata: {seq_len: 64}\n")
    site = ["--site", "image=registry.example/trimaran:1.0"] if target == "k8s" else []
    code = main(["launch", "r.yaml", "--set", f"cluster={cluster}", "--on", target, *site, "--dry-run", "--json"])
    launched = json.loads(capsys.readouterr().out)
    subject = read_subject("r.yaml", None, cluster, (), [f"target={target}"])
    explained = build_view("life", subject).modes["explain"]
    files = [each for each in explained.figures if isinstance(each, FileText)]
    if code:
        assert files == []
        assert launched["error"]["what"] in explained.sentences[0]
        return
    shown = {each.title.partition(": ")[2]: each.content for each in files[1:-1]}
    assert shown == launched["files"]
    assert files[-1].content.splitlines() == [shlex.join(words) for words in launched["submit"]]
    command = shlex.split(files[0].content)
    capsys.readouterr()
    assert main([*command[1:], "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == launched["files"]

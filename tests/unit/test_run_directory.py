"""The run directory, its journal and its logs of incidents and attempts."""

import json
import math
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.runs import new_run, step_metrics
from trimaran.core import Mesh, Plan, Prediction, Recipe, UserError, parse_recipe
from trimaran.runs import (
    AttemptLog,
    IncidentLog,
    Journal,
    RunDirectory,
    RunReader,
    append_line,
    create_run,
    free_run_path,
    last_step,
    open_run,
    read_attempts,
    read_incidents,
)

PREDICTION = Prediction(
    fits=True,
    peak_bytes=1000,
    reserved_bytes=1100,
    step_seconds=0.5,
    tokens_per_second=2.0,
    mfu=0.1,
    flops_per_step=3.0,
    device_peak_flops=4.0,
    memory={"weights": 1000},
    time={"compute": 0.5},
)


def test_a_new_run_saves_its_recipe_and_its_plan_with_the_prediction(tmp_path: Path) -> None:
    recipe = parse_recipe("", name="-", overrides=["plan.mesh.dp_shard=2", "train.steps=3"])
    plan = Plan(mesh=Mesh(dp_shard=2), sharding="parameters", prediction=PREDICTION)
    create_run(tmp_path / "deep" / "run", recipe, plan)
    run = open_run(tmp_path / "deep" / "run")
    assert run.read_recipe() == recipe
    assert run.read_plan() == plan
    assert json.loads(run.plan.read_text())["prediction"]["time"] == {"compute": 0.5}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    for path, code in ((tmp_path, "D002"), (tmp_path / "thesis.tex", "D002")):
        with pytest.raises(UserError) as caught:
            create_run(path, Recipe(), Plan())
        assert caught.value.code == code
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError) as caught:
        open_run(tmp_path)
    assert caught.value.code == "D002"


def test_a_new_run_never_overwrites_another(tmp_path: Path) -> None:
    create_run(tmp_path / "run", Recipe(), Plan())
    with pytest.raises(UserError) as caught:
        create_run(tmp_path / "run", Recipe(), Plan())
    assert caught.value.code == "D004"
    assert free_run_path(tmp_path, "run") == tmp_path / "run-2"


def test_of_many_launches_into_one_folder_exactly_one_claims_it(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def launch() -> None:
        try:
            create_run(tmp_path / "run", Recipe(), Plan())
            outcomes.append("won")
        except UserError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("won") == 1
    assert open_run(tmp_path / "run").read_plan() == Plan()


def test_an_unwritable_path_raises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (Path("/proc/trimaran-run"), tmp_path / "file" / "run"):
        with pytest.raises(UserError) as caught:
            create_run(path, Recipe(), Plan())
        assert caught.value.code == "D003"
        assert not path.exists()


def test_followers_yield_each_line_once_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    reader = RunReader(RunDirectory(tmp_path))
    assert list(reader.records(file)) == []
    file.write_text('{"a": 1}\n{"a"')
    assert list(reader.records(file)) == [{"a": 1}]
    with file.open("a") as more:
        more.write(": 2}\n")
    assert list(reader.records(file)) == [{"a": 2}]
    assert list(reader.records(file)) == []


def test_nan_and_inf_are_null_in_the_journal(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", Recipe(), Plan())
    with Journal(run, rank=1) as journal:
        journal.event("evaluation", step=3, loss=math.nan, worst=[math.inf, 1.0])
    record = json.loads(run.events(1).read_text())
    assert (record["rank"], record["step"], record["data"]) == (1, 3, {"loss": None, "worst": [None, 1.0]})


def test_an_incomplete_line_harms_neither_the_next_one_nor_a_resume(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for path in (run.incidents, run.attempts):
        path.write_text('{"id": "i-0001", "cause": "cra')
    incident = IncidentLog(run).notice("hang", "a rank hung")
    assert read_incidents(run) == [incident]
    assert (AttemptLog(run).begin(world_size=2), len(read_attempts(run).attempts)) == (0, 1)
    run.metrics.write_text('{"step": 1}\n{"ste\n{"step": 2}\n{"step": 3}\n{"st')
    with Journal(run, 0) as journal:
        journal.resume(2)
        journal.step(step_metrics(3, loss=1.0))
    assert run.metrics.read_bytes().splitlines()[:3] == [b'{"step": 1}', b'{"ste', b'{"step": 2}']
    assert last_step(run) == 3


def test_a_new_run_directory_is_private_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    create_run(tmp_path / "deep" / "run", Recipe(), Plan())
    assert stat.S_IMODE((tmp_path / "deep" / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) & 0o055  # a folder for several runs is like any other
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2750)
    create_run(shared, Recipe(), Plan())
    assert stat.S_IMODE(shared.stat().st_mode) == 0o2750


def test_a_line_with_the_path_of_a_held_directory_is_valid_json_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "q" \\ n'
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = Path(f"/proc/self/fd/{descriptor}")
        append_line(held / "events.jsonl", {"path": str(held / "model")})
    finally:
        os.close(descriptor)
    assert json.loads((folder / "events.jsonl").read_text()) == {"path": str(folder / "model")}

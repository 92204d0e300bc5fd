"""What runs measured: steady steps, the plan in force, the index, `trimaran history`, and the answer of `plan`."""

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.measured_runs import EPOCH, PlannedRun, gpu_plan, write_run, write_steps
from trimaran.app import main, runs_in
from trimaran.core import Plan
from trimaran.launch import JobRecord, state_folder, write_record
from trimaran.machine import FittedRates
from trimaran.planner import (
    RankStart,
    find_runs,
    index_path,
    measured_plans,
    open_index,
    pins_of,
    plans_in_force,
    predicted,
    read_measured_run,
    stamp_of,
)
from trimaran.runs import RunDirectory, StepLine, replace_plan, steady_steps

EIGHT = PlannedRun(cluster="8xH100", plan=gpu_plan(dp_replicate=8))
SHARDED = PlannedRun(cluster="8xH100", plan=gpu_plan(dp_shard=8))
QUESTION = ["plan", "llama-3.2-1b", "--cluster", "8xH100", "--seq-len", "4096", "--global-batch", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def line(step: int, seconds: float, *, time: float, data: float = 0.0, checkpoint: float = 0.0) -> StepLine:
    phases = {"data": data, "forward": seconds - data - checkpoint, "checkpoint": checkpoint}
    return StepLine(step, 1.0, 1.0, 1e-3, 100, 4, seconds, 0.0, 1 << 20, phases, time, b"")


def test_steady_steps_are_without_warm_up_checkpoints_and_waits() -> None:
    steps = [line(number, 9.0 if number <= 5 else 1.0, time=100.0 + number) for number in range(1, 21)]
    steps += [line(21, 5.0, time=130.0), *(line(number, 1.0, time=110.0 + number) for number in range(22, 31))]
    steps[15] = line(16, 3.0, time=116.0, data=2.0)  # waited for its batch
    event = {"kind": "checkpoint", "time": 129.0, "data": {"seconds": 4.0}}
    found = steady_steps(steps, [event])
    assert found is not None
    assert found.busy_seconds == 1.0
    assert found.step_seconds == 1.0
    assert found.num_steps == 24
    assert steady_steps(steps[:9], []) is None
    assert steady_steps(steps[:10], []) is not None
    # A restart has its own warm-up.
    again = steady_steps(steps[:20], [{"kind": "ready", "time": 110.5, "step": 10}])
    assert again is not None
    assert again.num_steps == 20 - 5 - 5


def test_each_part_of_a_resized_run_counts_with_its_own_plan(folder: Path) -> None:
    run = write_run(folder / "runs" / "resized", EIGHT)
    half = PlannedRun(cluster="4xH100", plan=gpu_plan(dp_replicate=4, accumulate=2))
    plan = predicted(half.plan, half.question)
    replace_plan(run, plan)
    os.utime(run.path / "plan-0.json", (EPOCH + 5000, EPOCH + 5000))
    write_steps(run, half, plan, None, since=24)
    found = {each.plan.mesh.dp_replicate: each for each in read_measured_run(run.path).plans}
    assert {ranks: each.cluster for ranks, each in found.items()} == {8: "8xH100", 4: "4xH100"}
    for each in found.values():
        assert each.plan.prediction is not None
        assert each.steps.step_seconds == pytest.approx(each.plan.prediction.step_seconds, rel=0.05)
    # A copy without the files' times: the number of ranks tells the plans apart.
    shutil.copytree(run.path, folder / "copy", copy_function=shutil.copyfile)
    again = read_measured_run(folder / "copy").plans
    assert {each.plan.mesh.dp_replicate: each.cluster for each in again} == {8: "8xH100", 4: "4xH100"}


def test_plans_that_cannot_be_told_apart_are_not_guessed(folder: Path) -> None:
    run = write_run(folder / "run", EIGHT)
    smaller = gpu_plan(dp_replicate=8).model_copy(update={"recompute": "full"})
    replace_plan(run, smaller)
    starts = [RankStart(time=EPOCH, world_size=8), RankStart(time=EPOCH + 9000, world_size=8)]
    plans = [run.read_plan(run.path / "plan-0.json"), run.read_plan()]
    os.utime(run.path / "plan-0.json", (EPOCH + 5000, EPOCH + 5000))
    assert plans_in_force(run, plans, starts) == [0, 1]
    os.utime(run.path / "plan-0.json", (EPOCH + 99999, EPOCH + 99999))  # copied later
    assert plans_in_force(run, plans, starts) == [None, 1]


def test_an_older_run_names_its_cluster_in_the_source_of_its_prediction(folder: Path) -> None:
    run = write_run(folder / "run", EIGHT)
    tree = json.loads(run.plan.read_text())
    del tree["prediction"]["cluster"]
    run.plan.write_text(json.dumps(tree))
    assert read_measured_run(run.path).plans[0].cluster == "8xH100"
    for node in range(2):
        run.samples(node).parent.mkdir(exist_ok=True)
        run.samples(node).write_text("{}\n")
    assert read_measured_run(run.path).plans[0].cluster == "2x4xH100"


def test_pins_give_the_same_plan_again() -> None:
    plan = gpu_plan(dp_shard=8).model_copy(update={"recompute": "full", "micro_batch": 2})
    assert Plan.model_validate(pins_of(plan)) == plan


def test_the_index_reads_a_run_again_only_if_it_changed(folder: Path) -> None:
    for name in ("a", "b"):
        write_run(folder / "runs" / name, EIGHT)
    (folder / "runs" / "broken").mkdir()
    shutil.copy(folder / "runs" / "a" / "trimaran-run.json", folder / "runs" / "broken")
    runs, path = list(find_runs(folder / "runs")), index_path(os.environ)
    index = open_index(path)
    assert index.refresh(runs) == 3
    index.write()
    again = open_index(path)
    assert again.runs == index.runs
    assert again.refresh(runs) == 0
    assert again.runs[str(runs[2])].reason
    assert again.runs[str(runs[0])].measured == measured_plans(read_measured_run(runs[0]))
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert again.refresh(runs) == 1
    assert path is not None
    path.write_text("{broken")
    assert open_index(path).runs == {}


def test_runs_are_listed_by_model_and_cluster_the_fastest_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder / "runs" / "slow", EIGHT, FittedRates(matmul={"bf16": 0.5}))
    write_run(folder / "runs" / "fast", EIGHT)
    other = PlannedRun(cluster="8xA100-80GB", plan=gpu_plan(dp_shard=8))
    write_run(folder / "elsewhere" / "deep" / "a100", other)
    found = answer(["history", "runs", "elsewhere"], capsys)
    assert [(each["model"], each["cluster"]) for each in found["groups"]] == [
        ("llama-3.2-1b", "8xA100-80GB"),
        ("llama-3.2-1b", "8xH100"),
    ]
    fast, slow = found["groups"][1]["plans"]
    assert [Path(each["run"]["path"]).name for each in (fast, slow)] == ["fast", "slow"]
    assert abs(fast["error"]) < 0.05
    assert slow["error"] < -0.2
    assert fast["measured"]["tokens_per_second"] > slow["measured"]["tokens_per_second"]
    assert len(answer(["history"], capsys)["groups"]) == 1
    assert answer(["history", "elsewhere", "--cluster", "h100"], capsys)["groups"] == []
    assert len(answer(["history", "--model", "LLAMA", "--cluster", "8xh100"], capsys)["groups"][0]["plans"]) == 2
    assert main(["history"]) == 0
    text = capsys.readouterr().out
    assert "llama-3.2-1b, 1.2B parameters, on 8xH100" in text
    assert text.index("fast") < text.index("slow")
    assert answer(["history", "nowhere"], capsys, code=2)["error"]["code"] == "D001"


def test_runs_of_launched_jobs_are_listed(folder: Path) -> None:
    run = write_run(folder / "shared" / "job", EIGHT)
    job = JobRecord(
        id="ssh-1", target="ssh", name="job", native_id="1", run_dir=str(run.path), folder="", submitted=1.0,
        host="", num_nodes=1, ranks_per_node=8, details={},
    )  # fmt: skip
    write_record(job, state_folder(os.environ))
    write_record(replace(job, id="ssh-2", run_dir="/not/here"), state_folder(os.environ))
    assert runs_in([], os.environ) == [run.path]


def test_plan_shows_the_best_measured_plan_and_how_to_train_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = answer(QUESTION, capsys)
    assert nothing["measured"] is None
    assert not (folder / "state").exists()  # without any run nothing is read or written
    write_run(folder / "runs" / "sharded", SHARDED)
    write_run(folder / "runs" / "slow", EIGHT, FittedRates(matmul={"bf16": 0.3}))
    write_run(folder / "runs" / "longer", PlannedRun(cluster="8xH100", plan=EIGHT.plan, seq_len=2048))
    found = answer(QUESTION, capsys)["measured"]
    assert Path(found["run"]["path"]).name == "sharded"
    assert Plan.model_validate(found["plan"]) == SHARDED.plan
    assert not found["is_best"]
    assert main(QUESTION) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "with dp_shard 8, shard parameters, bf16, batch 1 x 1, run runs/sharded of 20" in text
    assert "the planner's own is predicted at" in text
    command = shlex.split(found["next"])
    assert command[1] == "train"
    pinned = answer(["plan", *command[2:]], capsys)
    assert Plan.model_validate(pinned["plan"]) == SHARDED.plan
    assert pinned["measured"]["is_best"]
    assert pinned["measured"]["next"] is None
    # A run that is gone is not shown.
    shutil.rmtree(folder / "runs" / "sharded")
    assert Path(answer(QUESTION, capsys)["measured"]["run"]["path"]).name == "slow"


def test_a_run_is_found_by_its_marker_and_hidden_folders_are_not_searched(folder: Path) -> None:
    run = write_run(folder / "runs" / "a" / "b", EIGHT)
    shutil.copytree(run.path, folder / "runs" / ".trash" / "c")
    (folder / "runs" / "link").symlink_to(run.path)
    assert list(find_runs(folder / "runs")) == [run.path]
    assert list(find_runs(run.path)) == [run.path]
    assert stamp_of(run.path) == stamp_of(RunDirectory(run.path).path)

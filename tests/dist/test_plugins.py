"""The example package, built and installed, in real runs: every kind of plug-in does its work on two ranks."""

import csv
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environment import CACHE
from tests.launched import CommandLine, kill_processes
from tests.parity import assert_same_trajectory, plan_for, trajectory_of
from tests.plugin_packages import install_example
from tests.ranks import run_ranks
from trimaran.app import main, read_question
from trimaran.autopilot import Controller, RunSettings, settings_of
from trimaran.core import Mesh, Plan, Recipe, UserError, parse_recipe
from trimaran.planner import search
from trimaran.runs import RunDirectory, RunTail, create_run, open_feeds
from trimaran.train import read_rank_info, run_worker

STEPS, WEIGHT = 40, 1e-3  # a policy needs as many


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install_example(tmp_path_factory.mktemp("package"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [each for each in sys.modules if each.partition(".")[0] == "trimaran_example"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def recipe(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    file = tmp_path_factory.mktemp("data") / "texts.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE documents (body TEXT)")
        rows = [(f"{number} times {number} is {number * number}. " * 40,) for number in range(40)]
        database.executemany("INSERT INTO documents VALUES (?)", rows)
    database.close()
    text = f"""
name: plugged
model: {{family: causal-conv, shape: {{hidden: 16, width: 3}}}}
data: {{source: sqlite, path: {file}, text_field: body, seq_len: 32, holdout: 0.05, workers: 0}}
objective: {{name: z-loss, options: {{weight: {WEIGHT}}}}}
telemetry: {{sinks: {{csv: {{file: table.csv}}}}}}
autopilot: {{policy: fewer-copies}}
train: {{steps: {STEPS}, global_batch: 4, sample: {{tokens: 0}}}}
checkpoint: {{every: "off", memory: 0, asynchronous: false}}
"""
    return parse_recipe(text, name="recipe")


def train(recipe: Recipe, plan: Plan, path: Path, sites: Sequence[Path]) -> RunDirectory:
    """Return a finished run whose ranks find packages in `sites`, one folder for each."""
    run = create_run(path, recipe, plan)
    assert run_ranks(plan.mesh.world_size, worker_of, run.path, sites) == [0] * plan.mesh.world_size
    return run


def worker_of(path: Path, sites: Sequence[Path | None]) -> int:
    """Run one rank, with packages in its folder."""
    if (site := sites[int(os.environ["RANK"])]) is not None:
        sys.path.insert(0, str(site))
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE)


@pytest.fixture(scope="module")
def run(recipe: Recipe, site: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a finished run of two ranks, each with a part of every weight."""
    path = tmp_path_factory.mktemp("plugged") / "run"
    return train(recipe, plan_for(recipe, grad_accum=1, dp_shard=2), path, [site, site])


def test_sharded_and_accumulated_runs_train_as_one_process(
    recipe: Recipe, run: RunDirectory, site: Path, tmp_path: Path
) -> None:
    alone = train(recipe, plan_for(recipe, grad_accum=2), tmp_path / "run", [site])
    assert_same_trajectory(trajectory_of(run), trajectory_of(alone))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines[:3]:  # the objective is the plug-in's: its parts add up to the loss
        assert sum(line["losses"].values()) == pytest.approx(line["loss"], rel=1e-6)
        assert 0 < line["losses"]["z"] < 10 * WEIGHT * line["loss"] ** 2


def test_a_run_records_its_plugins(run: RunDirectory) -> None:
    recorded = json.loads(run.plugins.read_text())
    assert [(each["kind"], each["name"]) for each in recorded] == [
        ("objective", "z-loss"),
        ("data source", "sqlite"),
        ("network family", "causal-conv"),
        ("sink", "csv"),
        ("autopilot policy", "fewer-copies"),
    ]
    assert {(each["distribution"], each["version"]) for each in recorded} == {("trimaran-example", "1.2.0")}
    for rank in range(2):
        (start,) = [each for each in map(json.loads, run.events(rank).read_text().splitlines())
                    if each["kind"] == "start"]  # fmt: skip
        assert start["data"]["plugins"] == recorded


def test_the_sink_gets_every_step(run: RunDirectory) -> None:
    (feed,) = open_feeds(run.read_recipe().telemetry, run)
    for kind, line in RunTail(run).new():
        feed.put(kind, line)
    assert feed.close(seconds=60)
    with (run.path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))


def test_the_doctor_has_the_finding_of_the_rule(run: RunDirectory, capsys: Any) -> None:
    main(["doctor", str(run.path), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [each for each in findings if each["code"] == "EXAMPLE-NO-CHECKPOINTS"]
    assert found["verdict"] == f"a fault would cost all {STEPS} steps: the run writes no checkpoints"
    assert found["patch"] == {"checkpoint.every": "auto"}


def test_the_policy_decides_within_the_limits_of_the_recipe(run: RunDirectory, tmp_path: Path, caplog: Any) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    lines = [json.loads(line) | {"step_seconds": 0.01} for line in run.metrics.read_text().splitlines()]
    run = RunDirectory(tmp_path / "run")
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))  # whatever this machine does besides
    run.events(0).write_text("")  # and whatever disturbed a step
    loop = Controller(run).loop  # which has read the steps of the run
    settings = settings_of(run.read_plan(), run.read_recipe()) | {"checkpoint.memory": "auto"}
    facts = RunSettings(total_steps=2 * STEPS, settings=settings)
    (decision,) = loop.poll(facts, now=0.0, propose=list).decisions
    assert (decision.outcome, decision.patch, decision.undo) == (
        "advised", {"checkpoint.memory": 0}, {"checkpoint.memory": "auto"},
    )  # fmt: skip
    assert decision.reason.startswith("policy fewer-copies: steps take")
    pinned = Controller(run).loop
    pinned.pins.append("checkpoint.memory")
    assert pinned.poll(facts, now=0.0, propose=list).decisions == []
    assert "the change that the policy fewer-copies chose is not made: a field is pinned" in caplog.text


def test_the_planner_predicts_the_family_and_refuses_what_it_cannot_split(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"model: {{family: causal-conv}}\ndata: {{source: sqlite, path: {recipe.data.path}, text_field: body}}"
    )
    question = read_question(str(file), ["cluster=2xcpu", "train.global_batch=8"])
    answer = search(question)
    assert answer.ranked
    assert all(plan.mesh.dp == 2 and plan.prediction is not None for plan in answer.ranked)
    assert question.outline is not None
    # 257 x 64 embedded and projected, 2 norms a block and 1 after, and each block: a convolution of 4, a matrix
    blocks = 2 * (2 * 64 + (64 * 64 * 4 + 64) + (64 * 64 + 64))
    assert question.outline.num_parameters == 2 * 257 * 64 + blocks + 2 * 64
    for setting in ("plan.mesh.tp=2", "plan.mesh.pp=2", "plan.mesh.cp=2", "plan.loss=fused"):
        pinned = read_question(str(file), ["cluster=2xcpu", "objective.name=z-loss", setting])
        with pytest.raises(UserError, match=r"K080|P056"):
            search(pinned)
    with pytest.raises(UserError, match="K077: the network family 'causal-conv' was not built: TypeError"):
        read_question(str(file), ["cluster=2xcpu", "model.shape.depth=3"])


def test_the_target_writes_its_own_script(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    words = ["--set", "cluster=2xcpu", "--set", "model.family=causal-conv", "--set", "data.seq_len=32"]
    assert main(["launch", "--on", "nice", "--dry-run", "--json", "--run-dir", str(tmp_path / "new"), *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "renice -n 10 -p $$" in answer["files"]["run.sh"]


@pytest.mark.parametrize("other", ["nothing", "another version"])
def test_ranks_without_the_same_package_fail_alike(recipe: Recipe, site: Path, tmp_path: Path, other: str) -> None:
    instead = None
    if other == "another version":
        instead = tmp_path / "site"
        info = instead / "trimaran_example-1.3.0.dist-info"
        info.mkdir(parents=True)
        source = next(site.glob("*.dist-info"))
        for name in ("METADATA", "entry_points.txt"):
            (info / name).write_text((source / name).read_text().replace("Version: 1.2.0", "Version: 1.3.0"))
        (instead / "trimaran_example").symlink_to(site / "trimaran_example")
    plan = Plan(mesh=Mesh(dp_replicate=2), micro_batch=2)
    run = create_run(tmp_path / "run", recipe, plan)
    assert run_ranks(2, worker_of, run.path, [site, instead]) == [2, 2]
    errors = [[each["data"] for each in map(json.loads, run.events(rank).read_text().splitlines())
               if each["kind"] == "error"] for rank in range(2)]  # fmt: skip
    assert errors[0] == errors[1]
    (error,) = errors[0]
    if other == "nothing":
        assert (error["code"], "on rank 1" in error["where"]) == ("K075", True)
        assert error["what"] == "there is no objective 'z-loss' on this machine"
    else:
        assert error["code"] == "K078"
        assert error["what"] == "rank 0 has trimaran-example 1.2.0, and rank 1 has trimaran-example 1.3.0"


@pytest.mark.slow
def test_the_target_launches_a_run_with_every_plugin(recipe: Recipe, site: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
    line = CommandLine(tmp_path / "user", {"PYTHONPATH": path})
    file = line.folder / "recipe.yaml"
    file.write_text(
        "model: {family: causal-conv}\n"
        f"data: {{source: sqlite, path: {recipe.data.path}, text_field: body, seq_len: 32}}\n"
        "objective: {name: z-loss}\ntelemetry: {sinks: {csv: {}}}\n"
        "train: {steps: 300, global_batch: 4}\ncheckpoint: {every: 'off'}\ncluster: 2xcpu\n"
    )
    try:
        done = line.json("launch", str(file), "--on", "nice", "--run-dir", "runs/new", "--wait")
    finally:
        kill_processes(line.folder)
    assert (done["exit"], done["target"]) == (0, "nice")
    rows = (line.folder / "runs" / "new" / "steps.csv").read_text().splitlines()
    assert len(rows) == 301
    assert "EXAMPLE-NO-CHECKPOINTS" in line.trimaran("doctor", "runs/new")

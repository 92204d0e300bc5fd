"""A pipeline trains the trajectory of one process: every schedule, tied or not, dense or with experts."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases import quick_or_slow, slow
from tests.parity import assert_same_trajectory, plan_for, train_run, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Pipeline, Plan, Recipe
from trimaran.parallel import build_mesh
from trimaran.runs import RunDirectory
from trimaran.train import build_networks, join_process_group, read_rank_info

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
SHARDED: dict[str, dict[str, Any]] = {
    "dp_shard": {"dp_shard": 2},
    "dp_replicate": {"dp_replicate": 2},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of very different lengths, so that micro-batches have different numbers of tokens."""
    folder = tmp_path_factory.mktemp("pipeline")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, preset: str = "tiny", *, tied: bool = False, **train: Any) -> Recipe:
    data = {"source": "jsonl", "path": str(workspace / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    training = {"steps": 3, "global_batch": 16, "lr": 1e-2, "seed": 3}
    evaluation_and_sample = {
        "evaluate": {"every": 2, "batches": 2},
        "sample": {"prompt": "1 ", "tokens": 5, "temperature": 0},
    }
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE | {"tied": tied}},
            "data": data,
            "train": training | evaluation_and_sample | train,
        }
    )


def plan_with(recipe: Recipe, schedule: str, stages: tuple[int, ...] = (), **fields: Any) -> Plan:
    pipeline = Pipeline.model_validate({"schedule": schedule, "stages": stages})
    plan_fields: dict[str, Any] = {"grad_accum": 4, "pp": 2, "pipeline": pipeline} | fields
    return plan_for(recipe, **plan_fields)


@lru_cache
def reference_run(workspace: Path, preset: str, tied: bool) -> RunDirectory:
    recipe = recipe_for(workspace, preset, tied=tied)
    return train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")


def event_values(run: RunDirectory, kind: str, key: str) -> list[Any]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each["data"][key] for each in events if each["kind"] == kind]


def assert_same_run(run: RunDirectory, reference: RunDirectory) -> None:
    """Fail unless the trajectories, the held-out losses and the generated texts agree."""
    assert_same_trajectory(trajectory_of(run), trajectory_of(reference))
    losses = event_values(reference, "evaluation", "loss")
    assert len(losses) == 2  # after two steps, and at the end
    assert event_values(run, "evaluation", "loss") == pytest.approx(losses, rel=1e-5)
    assert event_values(run, "evaluation", "tokens") == event_values(reference, "evaluation", "tokens")
    assert event_values(run, "sample", "text") == event_values(reference, "sample", "text")


@lru_cache
def run_of(workspace: Path, schedule: str, tied: bool) -> RunDirectory:
    recipe = recipe_for(workspace, tied=tied)
    return train_run(recipe, plan_with(recipe, schedule), workspace / "runs")


@pytest.mark.parametrize(
    ("schedule", "tied"),
    quick_or_slow(
        [(schedule, tied) for schedule in SCHEDULES for tied in (False, True)],
        lambda case: case in {("1f1b", True), ("interleaved", False)},
    ),
)
def test_every_schedule_trains_evaluates_and_generates_as_one_process_does(
    workspace: Path, schedule: str, tied: bool
) -> None:
    assert_same_run(run_of(workspace, schedule, tied), reference_run(workspace, "tiny", tied))


@pytest.mark.slow  # the matrix trains experts in a pipeline
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_experts_of_every_stage_get_their_balance_gradient(workspace: Path, schedule: str) -> None:
    recipe = recipe_for(workspace, "tiny-moe")
    run = train_run(recipe, plan_with(recipe, schedule), workspace / "runs")
    assert_same_run(run, reference_run(workspace, "tiny-moe", False))


@pytest.mark.slow  # the matrix trains both products
@pytest.mark.parametrize(("schedule", "sharding"), [("1f1b", "dp_shard"), ("zero-bubble", "dp_replicate")])
def test_stages_are_sharded_and_replicated(workspace: Path, schedule: str, sharding: str) -> None:
    recipe = recipe_for(workspace, tied=True)
    run = train_run(recipe, plan_with(recipe, schedule, **SHARDED[sharding]), workspace / "runs")
    assert_same_run(run, reference_run(workspace, "tiny", True))


@pytest.mark.parametrize(
    ("schedule", "stages", "fields"),
    [
        slow(("1f1b", (), {"pp": 4})),
        ("1f1b", (3, 1), {"grad_accum": 2}),
        slow(("gpipe", (1, 3), {"grad_accum": 16})),
        slow(("interleaved", (1, 1, 1, 1), {"grad_accum": 2})),
        slow(("zero-bubble", (1, 1, 1, 1), {"grad_accum": 8})),
    ],
)
def test_stages_may_be_given_and_micro_batches_may_be_few_or_many(
    workspace: Path, schedule: str, stages: tuple[int, ...], fields: dict[str, Any]
) -> None:
    recipe = recipe_for(workspace, tied=True)
    run = train_run(recipe, plan_with(recipe, schedule, stages, **fields), workspace / "runs")
    assert_same_run(run, reference_run(workspace, "tiny", True))


@pytest.mark.slow
def test_many_stages_per_rank_of_different_sizes_are_sharded(workspace: Path) -> None:
    deep = SHAPE | {"layers": 9, "tied": True}
    recipe = recipe_for(workspace, steps=3, evaluate={"batches": 0})
    recipe = recipe.model_copy(update={"model": ModelSection.model_validate({"preset": "tiny", "shape": deep})})
    reference = train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")
    plan = plan_with(recipe, "interleaved", (1, 1, 1, 1, 1, 2, 1, 1), dp_shard=2)
    assert_same_trajectory(trajectory_of(train_run(recipe, plan, workspace / "runs")), trajectory_of(reference))


@pytest.mark.slow
def test_bf16_matches_fp32_within_its_precision(workspace: Path) -> None:
    recipe = recipe_for(workspace)
    run = train_run(recipe, plan_with(recipe, "zero-bubble", precision="bf16"), workspace / "runs")
    trajectory, fp32 = trajectory_of(run), trajectory_of(reference_run(workspace, "tiny", False))
    assert trajectory.losses == pytest.approx(fp32.losses, rel=5e-3)
    assert trajectory.losses != fp32.losses


def test_every_metrics_line_has_the_measured_bubble(workspace: Path) -> None:
    run = run_of(workspace, "1f1b", True)
    plan = run.read_plan()
    for line in map(json.loads, run.metrics.read_text().splitlines()):
        assert line["bubble"]["theoretical"] == plan.bubble == 1 / 5
        assert 0 < line["bubble"]["measured"] < 1
        assert sum(line["bubble"]["stage_layers"]) == SHAPE["layers"]
        assert all(0 < seconds < line["step_seconds"] for seconds in line["bubble"]["stage_seconds"])
        assert all(line["phases"][phase] > 0 for phase in ("forward", "backward", "comm", "optimizer"))
        assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"])


def names_under(cases: list[tuple[Recipe, Plan]]) -> list[list[list[tuple[str, tuple[int, ...]]]]]:
    rank_info, found = read_rank_info(os.environ), []
    join_process_group(rank_info)
    for recipe, plan in cases:
        networks = build_networks(recipe, plan, rank_info, build_mesh(plan.mesh, device_type="cpu"))
        found.append([[(name, tuple(each.shape)) for name, each in one.module.named_parameters()] for one in networks])
    dist.barrier()  # no rank may exit while another is still joining a group
    return found


def test_the_names_of_all_stages_are_those_of_the_plain_network(workspace: Path) -> None:
    recipes = [recipe_for(workspace, "tiny", tied=True), recipe_for(workspace, "tiny-moe", tied=False)]
    cases = [(recipe, schedule) for recipe in recipes for schedule in ("1f1b", "zero-bubble")]
    (alone,) = run_ranks(1, names_under, [(recipe, plan_for(recipe, grad_accum=1)) for recipe in recipes])
    by_rank = run_ranks(2, names_under, [(recipe, plan_with(recipe, schedule)) for recipe, schedule in cases])
    for number, (recipe, _) in enumerate(cases):
        stages = [stage for rank in by_rank for stage in rank[number]]
        (plain,) = alone[recipes.index(recipe)]
        assert {each for stage in stages for each in stage} == set(plain)
        # Only a tied embedding is on two stages.
        assert sum(map(len, stages)) == len(plain) + (recipe is recipes[0])


@pytest.mark.parametrize("schedule", ["1f1b", slow("zero-bubble")])
def test_a_saved_model_is_fine_tuned_in_a_pipeline(workspace: Path, schedule: str) -> None:
    folder = reference_run(workspace, "tiny", True).model
    recipe = recipe_for(workspace, steps=2, evaluate={"batches": 0}).model_copy(
        update={"model": ModelSection(path=str(folder))}
    )
    reference = train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")
    run = train_run(recipe, plan_with(recipe, schedule), workspace / "runs")
    assert_same_trajectory(trajectory_of(run), trajectory_of(reference))
    fresh = trajectory_of(reference_run(workspace, "tiny", True)).losses
    assert trajectory_of(run).losses[0] < 0.95 * fresh[0], "it starts from the saved weights"

"""A pipeline trains the trajectory of one process: every schedule, tied or not, dense or with experts."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases import quick_or_slow
from tests.parity import assert_same_course, plan_for, sail_to, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import ModelSection, Pipeline, Plan, Recipe
from trimaran.parallel import build_mesh
from trimaran.run import RunDirectory
from trimaran.train.networks import build_networks
from trimaran.train.process.rank_info import join, read_rank_info

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
SHARDED: dict[str, dict[str, Any]] = {
    "dp_shard": {"dp_shard": 2},
    "dp_replicate": {"dp_replicate": 2},
    "zero-1": {"dp_shard": 2, "sharding": "optimizer"},
}


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of very uneven length, so that every micro-batch counts different valid tokens."""
    folder = tmp_path_factory.mktemp("pipeline")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(harbour: Path, preset: str = "tiny", *, tied: bool = False, **train: Any) -> Recipe:
    data = {"source": "jsonl", "path": str(harbour / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    moderate = {"steps": 10, "global_batch": 16, "lr": 3e-3, "seed": 3}
    looks = {"evaluate": {"every": 4, "batches": 2}, "sample": {"prompt": "1 ", "tokens": 5, "temperature": 0}}
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE | {"tied": tied}},
            "data": data,
            "train": moderate | looks | train,
        }
    )


def plan_with(recipe: Recipe, schedule: str, stages: tuple[int, ...] = (), **fields: Any) -> Plan:
    pipeline = Pipeline.model_validate({"schedule": schedule, "stages": stages})
    return plan_for(recipe, **({"grad_accum": 4, "pp": 2, "pipeline": pipeline} | fields))


@lru_cache
def alone(harbour: Path, preset: str, tied: bool) -> RunDirectory:
    recipe = recipe_for(harbour, preset, tied=tied)
    return sail_to(recipe, plan_for(recipe, grad_accum=1), harbour / "runs")


def noted(run: RunDirectory, kind: str, key: str) -> list[Any]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each["data"][key] for each in events if each["kind"] == kind]


def assert_same_incarnation(run: RunDirectory, reference: RunDirectory) -> None:
    """Fail unless the trajectories agree, and the held-out losses and the text on the way."""
    assert_same_course(trajectory_of(run), trajectory_of(reference))
    losses = noted(reference, "evaluation", "loss")
    assert len(losses) == 3
    assert noted(run, "evaluation", "loss") == pytest.approx(losses, rel=1e-5)
    assert noted(run, "evaluation", "tokens") == noted(reference, "evaluation", "tokens")
    assert noted(run, "sample", "text") == noted(reference, "sample", "text")


@pytest.mark.parametrize(
    ("schedule", "tied"),
    # Tied ones with the other schedules are below, sharded or cut by hand.
    quick_or_slow(
        [(schedule, tied) for schedule in SCHEDULES for tied in (False, True)],
        lambda case: case in {("gpipe", False), ("1f1b", True), ("interleaved", False), ("zero-bubble", False)},
    ),
)
def test_every_schedule_trains_evaluates_and_writes_as_one_process_does(
    harbour: Path, schedule: str, tied: bool
) -> None:
    recipe = recipe_for(harbour, tied=tied)
    run = sail_to(recipe, plan_with(recipe, schedule), harbour / "runs")
    assert_same_incarnation(run, alone(harbour, "tiny", tied))


@pytest.mark.parametrize("schedule", quick_or_slow(SCHEDULES, {"1f1b", "zero-bubble"}.__contains__))
def test_experts_of_every_stage_get_their_balance_gradient(harbour: Path, schedule: str) -> None:
    recipe = recipe_for(harbour, "tiny-moe")
    run = sail_to(recipe, plan_with(recipe, schedule), harbour / "runs")
    assert_same_incarnation(run, alone(harbour, "tiny-moe", False))


@pytest.mark.parametrize(
    ("schedule", "sharding"),
    quick_or_slow(
        [(schedule, sharding) for schedule in SCHEDULES[1:] for sharding in SHARDED],
        lambda case: case in {("1f1b", "dp_shard"), ("zero-bubble", "dp_replicate")},
    ),
)
def test_stages_are_sharded_and_replicated(harbour: Path, schedule: str, sharding: str) -> None:
    recipe = recipe_for(harbour, tied=True)
    run = sail_to(recipe, plan_with(recipe, schedule, **SHARDED[sharding]), harbour / "runs")
    assert_same_incarnation(run, alone(harbour, "tiny", True))


@pytest.mark.parametrize(
    ("schedule", "stages", "fields"),
    [
        ("1f1b", (), {"pp": 4}),
        ("1f1b", (3, 1), {"grad_accum": 2}),
        ("gpipe", (1, 3), {"grad_accum": 16}),
        ("interleaved", (1, 1, 1, 1), {"grad_accum": 2}),
        ("zero-bubble", (1, 1, 1, 1), {"grad_accum": 8}),
    ],
)
def test_stages_are_cut_by_hand_and_micro_batches_may_be_few_or_many(
    harbour: Path, schedule: str, stages: tuple[int, ...], fields: dict[str, Any]
) -> None:
    recipe = recipe_for(harbour, tied=True)
    run = sail_to(recipe, plan_with(recipe, schedule, stages, **fields), harbour / "runs")
    assert_same_incarnation(run, alone(harbour, "tiny", True))


def test_many_stages_a_rank_of_different_size_are_sharded(harbour: Path) -> None:
    deep = SHAPE | {"layers": 9, "tied": True}
    recipe = recipe_for(harbour, steps=3, evaluate={"batches": 0})
    recipe = recipe.model_copy(update={"model": ModelSection.model_validate({"preset": "tiny", "shape": deep})})
    reference = sail_to(recipe, plan_for(recipe, grad_accum=1), harbour / "runs")
    plan = plan_with(recipe, "interleaved", (1, 1, 1, 1, 1, 2, 1, 1), dp_shard=2)
    assert_same_course(trajectory_of(sail_to(recipe, plan, harbour / "runs")), trajectory_of(reference))


def test_bf16_follows_fp32_within_its_precision(harbour: Path) -> None:
    recipe = recipe_for(harbour)
    run = sail_to(recipe, plan_with(recipe, "zero-bubble", precision="bf16"), harbour / "runs")
    course, fp32 = trajectory_of(run), trajectory_of(alone(harbour, "tiny", False))
    assert course.losses == pytest.approx(fp32.losses, rel=5e-3)
    assert course.losses != fp32.losses


def test_every_step_tells_how_long_its_ranks_waited(harbour: Path) -> None:
    recipe = recipe_for(harbour, steps=3)
    plan = plan_with(recipe, "1f1b")
    lines = sail_to(recipe, plan, harbour / "runs").metrics.read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["bubble"]["theoretical"] == plan.bubble == 1 / 5
        assert 0 < line["bubble"]["measured"] < 1
        assert all(line["phases"][phase] > 0 for phase in ("forward", "backward", "comm", "optimizer"))
        assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"])


def names_under(recipe: Recipe, plan: Plan) -> list[list[tuple[str, tuple[int, ...]]]]:
    place = read_rank_info(os.environ)
    join(place)
    networks = build_networks(recipe, plan, place, build_mesh(plan.mesh, device_type="cpu"))
    dist.barrier()  # who leaves first must not cut off who is still joining a group
    return [[(name, tuple(each.shape)) for name, each in one.module.named_parameters()] for one in networks]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_names_of_all_stages_are_those_of_the_plain_network(harbour: Path, preset: str, tied: bool) -> None:
    recipe = recipe_for(harbour, preset, tied=tied)
    ((plain,),) = run_ranks(1, names_under, recipe, plan_for(recipe, grad_accum=1))
    for schedule in ("1f1b", "zero-bubble"):
        ranks = run_ranks(2, names_under, recipe, plan_with(recipe, schedule))
        stages = [stage for rank in ranks for stage in rank]
        assert {each for stage in stages for each in stage} == set(plain)
        # Nothing is held twice but the embedding that is the head as well.
        assert sum(map(len, stages)) == len(plain) + tied


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_saved_model_is_fine_tuned_in_a_pipeline(harbour: Path, schedule: str) -> None:
    folder = alone(harbour, "tiny", True).model
    recipe = recipe_for(harbour, steps=4).model_copy(update={"model": ModelSection(path=str(folder))})
    reference = sail_to(recipe, plan_for(recipe, grad_accum=1), harbour / "runs")
    run = sail_to(recipe, plan_with(recipe, schedule), harbour / "runs")
    assert_same_course(trajectory_of(run), trajectory_of(reference))
    fresh = trajectory_of(alone(harbour, "tiny", True)).losses
    assert trajectory_of(run).losses[0] < 0.95 * fresh[0], "it starts from what was saved"

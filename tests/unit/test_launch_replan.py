"""Plans for a started run: with less memory, or for another number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimaran.core import Plan, Recipe
from trimaran.launch import (
    GrowthPlanner,
    Node,
    fit_plan,
    larger_size,
    less_memory,
    read_resize_request,
    resized,
    smaller_sizes,
    with_prediction,
)
from trimaran.planner import next_rung
from trimaran.runs import AttemptLog, RunDirectory, create_run, replace_plan

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


def recipe_with(plan: dict[str, Any] | str = "auto", *, ranks: tuple[int, int] | None = None) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE},
            "data": {"seq_len": 32},
            "train": {"global_batch": 12},
            "cluster": "3xcpu",
            "plan": plan,
            "faults": {"ranks": ranks},
        }
    )


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate(fields)


def test_a_plan_with_less_memory_keeps_the_global_batch_and_ends_with_recompute() -> None:
    plan, seen = plan_of(mesh={"dp_replicate": 2}, micro_batch=6, grad_accum=1), []
    while found := next_rung(plan):
        plan = found[0]
        seen.append((plan.micro_batch, plan.grad_accum, plan.recompute))
        assert plan.global_batch == 12
    assert seen == [(3, 2, "none"), (1, 6, "none"), (1, 6, "full")]


def test_a_plan_with_less_memory_gets_its_own_prediction() -> None:
    plan = plan_of(mesh={"dp_replicate": 3}, micro_batch=4)
    found = less_memory(with_prediction(plan, recipe_with()), recipe_with())
    assert found is not None
    assert found[0].prediction is None
    assert with_prediction(found[0], recipe_with()).prediction is not None


@pytest.mark.parametrize("pins", ["auto", {"mesh": {"dp_replicate": 3}, "micro_batch": 4, "precision": "bf16"}])
def test_another_number_of_ranks_keeps_batch_and_precision(pins: Any) -> None:
    recipe = recipe_with(pins)
    plan = plan_of(mesh={"dp_replicate": 3}, micro_batch=4, precision="bf16", comm={"bucket_mb": 50})
    for size in (1, 2, 4):
        new = resized(plan, recipe, size)
        assert new is not None
        assert (new.mesh.world_size, new.global_batch, new.precision) == (size, 12, "bf16")
        assert new.comm == plan.comm


def test_a_size_that_does_not_divide_the_batch_gives_a_plan_with_the_same_batch_or_none() -> None:
    new = resized(plan_of(mesh={"dp_replicate": 3}, micro_batch=4), recipe_with(), 5)
    assert new is None or new.global_batch == 12


def test_a_run_gets_smaller_only_within_the_recipes_range() -> None:
    plan = plan_of(mesh={"dp_replicate": 3}, micro_batch=4)
    assert list(smaller_sizes(plan, recipe_with())) == []
    assert list(smaller_sizes(plan, recipe_with(ranks=(1, 3)))) == [2, 1]


class FakeNode:
    """A node with a capacity only."""

    def __init__(self, num_ranks: int) -> None:
        self.name, self.num_ranks = "here", num_ranks


def nodes(*capacities: int) -> list[Node]:
    return [FakeNode(each) for each in capacities]  # type: ignore[misc]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "run", recipe_with(ranks=(1, 4)), plan_of(mesh={"dp_replicate": 3}, micro_batch=4))


def test_earlier_plans_are_kept_as_numbered_files(run: RunDirectory) -> None:
    old = run.plan.read_text()
    replace_plan(run, plan_of(micro_batch=12))
    replace_plan(run, plan_of(micro_batch=6, grad_accum=2))
    assert (run.path / "plan-0.json").read_text() == old
    assert json.loads((run.path / "plan-1.json").read_text())["plan"]["micro_batch"] == 12
    assert run.read_plan().micro_batch == 6


def test_a_plan_that_fits_stays_and_another_is_replaced(run: RunDirectory) -> None:
    assert fit_plan(run, nodes(2, 2)) == ""
    assert not (run.path / "plan-0.json").exists()
    assert fit_plan(run, nodes(2)) == ""
    assert run.read_plan().mesh.world_size == 2
    assert fit_plan(run, nodes(2, 2), world_size=4) == ""
    assert run.read_plan().mesh.world_size == 4


@pytest.mark.parametrize(
    ("text", "size"), [("2", 2), ("4\n", 4), ("3", None), ("9", None), ("two", None), ("-1", None)]
)
def test_an_impossible_resize_request_is_refused(run: RunDirectory, text: str, size: int | None) -> None:
    run.resize_request.write_text(text)
    assert read_resize_request(run, nodes(2, 2)) == size
    assert run.resize_request.exists() == (size is not None)


def test_a_run_grows_as_far_as_capacity_recipe_and_batch_allow(run: RunDirectory) -> None:
    assert larger_size(run, capacity=9) == 4
    assert larger_size(run, capacity=3) is None


def test_only_the_first_start_may_have_more_ranks_than_the_plan(run: RunDirectory) -> None:
    planner = GrowthPlanner(run, lambda nodes: 8)
    assert planner.size_at_start(nodes(2, 2)) == 4
    assert planner.size_at_start(nodes(2, 2)) is None
    assert GrowthPlanner(run, lambda nodes: None).size_at_start(nodes(2, 2)) is None


def test_a_run_that_is_not_elastic_grows_at_its_start_only_if_it_had_started_before(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", recipe_with(), plan_of(mesh={"dp_replicate": 2}, micro_batch=6))
    assert GrowthPlanner(run, lambda nodes: 8).size_at_start(nodes(2, 2)) is None
    AttemptLog(run).begin(world_size=2)
    assert GrowthPlanner(run, lambda nodes: 8).size_at_start(nodes(2, 2)) == 3


def test_nodes_that_join_are_planned_for_once_in_an_attempt(run: RunDirectory) -> None:
    planner = GrowthPlanner(run, lambda nodes: 8)
    assert [planner.size_with_joined(nodes(3)) for _ in range(2)] == [4, None]
    planner.size_at_start(nodes(3))
    assert planner.size_with_joined(nodes(3)) == 4


def test_without_a_plan_for_the_full_capacity_fewer_ranks_are_used(tmp_path: Path) -> None:
    recipe = recipe_with(ranks=(1, 12))
    run = create_run(tmp_path / "run", recipe, plan_of(mesh={"dp_replicate": 12}))
    assert resized(run.read_plan(), recipe, 11) is None
    assert fit_plan(run, nodes(11)) == ""
    assert run.read_plan().mesh.world_size < 11

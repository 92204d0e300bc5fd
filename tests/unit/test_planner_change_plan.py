"""What a patch makes of the plan of a running run, and what is refused."""

from typing import Any

import pytest

from trimaran.core import Comm, Mesh, Plan, Recipe, UserError
from trimaran.planner import apply_patch, change_run, is_in_place, patch_between, plan_with

RECIPE = Recipe.model_validate({"train": {"global_batch": 16}, "cluster": "4xcpu"})
REPLICAS = Plan(mesh=Mesh(dp_replicate=4), micro_batch=2, grad_accum=2)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"plan.micro_batch": 4}, {"plan.micro_batch": 4, "plan.grad_accum": 1}),
        ({"plan.grad_accum": 4}, {"plan.micro_batch": 1, "plan.grad_accum": 4}),
        ({"plan.mesh.tp": 2}, {"plan.mesh.tp": 2, "plan.mesh.dp_replicate": 2, "plan.grad_accum": 4}),
        ({"plan.mesh.pp": 2}, {"plan.mesh.pp": 2, "plan.mesh.dp_replicate": 2, "plan.grad_accum": 4}),
        (
            {"plan.sharding": "parameters"},
            {"plan.sharding": "parameters", "plan.mesh.dp_shard": 4, "plan.mesh.dp_replicate": 1},
        ),
        (
            {"plan.mesh.dp_shard": 2},
            {"plan.mesh.dp_shard": 2, "plan.mesh.dp_replicate": 2, "plan.sharding": "parameters"},
        ),
        ({"plan.recompute": "full"}, {"plan.recompute": "full"}),
    ],
)
def test_fields_follow_those_that_are_set(patch: dict[str, Any], expected: dict[str, Any]) -> None:
    changed = change_run(RECIPE, REPLICAS, patch, {})
    assert patch_between(REPLICAS, changed.plan) == expected
    assert changed.plan.global_batch == 16
    assert changed.plan.prediction is not None
    in_place = {"plan.micro_batch", "plan.grad_accum", "plan.recompute"}
    assert changed.how == ("in place" if {*expected} <= in_place else "rebuilt")
    again = change_run(RECIPE, REPLICAS, expected, {})  # the complete patch says the same
    assert patch_between(changed.plan, again.plan) == {}


@pytest.mark.parametrize(
    ("fields", "patch", "expected"),
    [
        ({}, {"plan.recompute": "full"}, True),
        ({}, {"plan.recompute": "selective"}, False),  # on a CPU, projections are joined without it
        ({"compile": True}, {"plan.recompute": "full"}, False),
        ({}, {"plan.comm.bucket_mb": 50}, True),
        ({"comm": Comm(overlap=False)}, {"plan.comm.bucket_mb": 50}, False),
        ({"mesh": Mesh(dp_shard=4), "sharding": "parameters"}, {"plan.comm.bucket_mb": 50}, False),
        ({"mesh": Mesh(dp_shard=4), "sharding": "parameters"}, {"plan.comm.prefetch": 2}, True),
        ({"mesh": Mesh(dp_shard=4), "sharding": "parameters"}, {"plan.recompute": "selective"}, True),
        ({}, {"plan.compile": True}, False),
        ({"mesh": Mesh(dp_replicate=2, pp=2)}, {"plan.pipeline.schedule": "gpipe"}, False),
    ],
)
def test_networks_stay_where_they_can(fields: dict[str, Any], patch: dict[str, Any], expected: bool) -> None:
    plan = REPLICAS.model_copy(update=fields)
    assert is_in_place(plan, plan_with(plan, patch)) == expected
    assert is_in_place(plan_with(plan, patch), plan) == expected


def test_the_loader_and_checkpoints_change_in_place_and_pinned_fields_of_the_recipe_follow() -> None:
    recipe = RECIPE.model_copy(update={"plan": Plan(micro_batch=2)})
    changed = change_run(recipe, REPLICAS, {"data.workers": 2, "checkpoint.every": 50, "plan.micro_batch": 4}, {})
    assert (changed.how, changed.recipe.data.workers, changed.recipe.checkpoint.every) == ("in place", 2, 50)
    assert isinstance(changed.recipe.plan, Plan)
    assert changed.recipe.plan.model_dump(exclude_unset=True) == {"micro_batch": 4}
    assert apply_patch(RECIPE, REPLICAS, {"plan.micro_batch": 4})[1].plan == "auto"


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ({"plan.precision": "bf16"}, "S040"),
        ({"plan.comm.local_steps": 2}, "S040"),
        ({"train.seed": 1}, "S040"),
        ({"plan.micro_batch": 4, "plan.grad_accum": 4}, "S041"),
        ({"plan.mesh.tp": 3}, "S043"),
        ({"plan.mesh": {"dp_replicate": 2}}, "S043"),
        ({"plan.mesh.tp": 4}, "P008"),
        ({"plan.nothing": 1}, "R011"),
        ({"plan.micro_batch": "many"}, "R012"),
    ],
)
def test_what_changes_the_results_or_cannot_run_is_refused(patch: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as caught:
        change_run(RECIPE, REPLICAS, patch, {})
    assert caught.value.code == code


def test_compressed_gradients_pin_the_mesh_and_other_engines_pin_everything() -> None:
    compressed = REPLICAS.model_copy(update={"comm": REPLICAS.comm.model_copy(update={"compression": "bf16"})})
    for plan, patch in (
        (compressed, {"plan.mesh.tp": 2}),
        (REPLICAS.model_copy(update={"engine": "async"}), {"plan.micro_batch": 4}),
        (REPLICAS.model_copy(update={"micro_batches": "measured"}), {"plan.micro_batch": 4}),
    ):
        with pytest.raises(UserError) as caught:
            change_run(RECIPE, plan, patch, {})
        assert caught.value.code == "S040"
    assert change_run(RECIPE, compressed, {"plan.micro_batch": 4}, {}).how == "in place"

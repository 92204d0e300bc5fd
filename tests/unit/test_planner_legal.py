"""Every plan that cannot run is refused, with words that help."""

from typing import Any

import pytest

from trimaran.core import DataSection, Plan, Recipe, TrainSection, UserError
from trimaran.hardware import parse_cluster
from trimaran.models import PRESETS
from trimaran.planner import check_plan

TINY = PRESETS["tiny"]
EIGHT = parse_cluster("8xH100")


def check(plan: dict[str, Any], *, global_batch: int = 32, seq_len: int = 256) -> None:
    recipe = Recipe(data=DataSection(seq_len=seq_len), train=TrainSection(global_batch=global_batch))
    check_plan(Plan.model_validate(plan), recipe, TINY, EIGHT)


def refusal(plan: dict[str, Any], **recipe: int) -> UserError:
    with pytest.raises(UserError) as caught:
        check(plan, **recipe)
    return caught.value


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_replicate": 8}, "micro_batch": 4},
        {"mesh": {"dp_replicate": 8}, "micro_batch": 2, "grad_accum": 2, "precision": "bf16", "compile": True},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 4},
        {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "sharding": "parameters", "micro_batch": 4},
    ],
)
def test_plans_of_data_parallelism_are_legal(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("plan", "field", "works"),
    [
        ({"mesh": {"tp": 2}}, "mesh.tp", "1"),
        ({"mesh": {"pp": 2}}, "mesh.pp", "1"),
        ({"mesh": {"cp": 2}}, "mesh.cp", "1"),
        ({"mesh": {"ep": 2}}, "mesh.ep", "1"),
        ({"sharding": "optimizer"}, "sharding", "none or parameters"),
        ({"sharding": "gradients"}, "sharding", "none or parameters"),
        ({"pipeline": {"stages": [2, 2]}}, "pipeline.stages", "leave it out"),
        ({"precision": "fp16"}, "precision", "fp32 or bf16"),
        ({"precision": "fp8"}, "precision", "fp32 or bf16"),
        ({"recompute": "full"}, "recompute", "none"),
        ({"recompute": 2}, "recompute", "none"),
        ({"offload": "optimizer"}, "offload", "none"),
        ({"comm": {"compression": "bf16"}}, "comm.compression", "none"),
        ({"comm": {"local_steps": 4}}, "comm.local_steps", "1"),
        ({"engine": "deepspeed"}, "engine", "torch"),
    ],
)
def test_what_is_not_built_yet_is_refused_with_what_works(plan: dict[str, Any], field: str, works: str) -> None:
    error = refusal(plan)
    assert (error.code, error.where) == ("P003", f"plan.{field}")
    assert "not built yet in version 0.1" in error.what
    assert works in error.fix


def test_degrees_must_multiply_to_the_devices() -> None:
    error = refusal({"mesh": {"dp_replicate": 3}})
    assert error.code == "P001"
    assert "3 ranks" in error.what
    assert "8xH100 has 8" in error.what
    assert "8 x 1 or 4 x 2 or 2 x 4 or 1 x 8" in error.fix


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 8}},
        {"mesh": {"dp_replicate": 8}, "sharding": "parameters"},
    ],
)
def test_mesh_and_sharding_must_agree(plan: dict[str, Any]) -> None:
    assert refusal(plan).code == "P004"


@pytest.mark.parametrize(
    ("micro_batch", "grad_accum", "fix"),
    [(2, 1, "plan.grad_accum to 2"), (3, 1, "plan.micro_batch to 1 or 2 or 4"), (4, 2, "train.global_batch to 64")],
)
def test_the_parts_must_make_up_the_global_batch(micro_batch: int, grad_accum: int, fix: str) -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": micro_batch, "grad_accum": grad_accum})
    assert error.code == "P002"
    assert fix in error.fix


def test_a_sequence_must_fit_the_positions_of_the_model() -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": 4}, seq_len=4096)
    assert error.code == "P005"
    assert "2,048" in error.what


def test_a_foreign_model_has_no_positions_to_check() -> None:
    recipe = Recipe(data=DataSection(seq_len=4096))
    check_plan(Plan.model_validate({"mesh": {"dp_replicate": 8}, "micro_batch": 4}), recipe, None, EIGHT)

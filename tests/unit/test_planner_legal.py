"""Every plan that cannot run is refused, and the error says how to fix it."""

from dataclasses import replace
from typing import Any

import pytest

from trimaran.core import DataSection, Plan, Recipe, TrainSection, UserError
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, spec_of
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
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 4},
            "sharding": "parameters",
            "micro_batch": 4,
            "comm": {"local_steps": 10},
        },
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
            "sharding": "parameters",
            "micro_batch": 8,
            "comm": {
                "local_steps": {"steps": 50, "outer": {"optimizer": "nesterov"}, "fragments": 4, "overlap_steps": 5}
            },
        },
    ],
)
def test_data_parallel_plans_are_legal(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("plan", "field", "works"),
    [
        ({"comm": {"compression": "topk"}, "mesh": {"dp_shard": 8}}, "compression", "int8"),
        (
            {"comm": {"compression": {"kind": "int8", "error_feedback": True}}, "mesh": {"dp_shard": 8}},
            "compression",
            "without error feedback",
        ),
        (
            {"comm": {"compression": {"kind": "int8", "layers": ["mlp"]}}, "mesh": {"dp_shard": 8}},
            "compression.layers",
            "leave out",
        ),
        ({"comm": {"compression": "bf16"}, "mesh": {"dp_replicate": 4, "pp": 2}}, "compression", "without pp"),
        ({"comm": {"compression": "bf16"}, "mesh": {"dp_replicate": 4, "tp": 2}}, "compression", "dp_replicate"),
        (
            {"comm": {"compression": "int8"}, "mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
            "compression",
            "dp_shard alone",
        ),
        ({"comm": {"local_steps": 4}, "mesh": {"dp_shard": 8}}, "local_steps", "dp_replicate"),
        ({"comm": {"local_steps": {"steps": 4, "fragments": 5}}}, "local_steps.fragments", "4 or less"),
        ({"comm": {"local_steps": {"steps": 4, "overlap_steps": 4}}}, "local_steps.overlap_steps", "3 or less"),
        ({"comm": {"local_steps": {"steps": 4, "elastic": True, "fragments": 2}}}, "local_steps.elastic", "leave out"),
        (
            {"comm": {"local_steps": {"steps": 4, "elastic": True, "overlap_steps": 1}}},
            "local_steps.elastic",
            "overlap",
        ),
        ({"comm": {"local_steps": {"steps": 4, "outer": {"lr": 0.7}}}}, "local_steps.outer", "nesterov"),
        (
            {"comm": {"local_steps": {"compression": "sparse", "outer": {"optimizer": "nesterov"}}}},
            "local_steps.outer",
            "sgd",
        ),
        (
            {"comm": {"local_steps": {"steps": 4, "outer": {"optimizer": "nesterov", "momentum": 0.0}}}},
            "local_steps.outer",
            "sgd",
        ),
        ({"comm": {"overlap": False, "local_steps": 4}}, "overlap", "leave out"),
        ({"comm": {"local_steps": 4, "compression": "topk"}}, "compression", "leave out"),
        ({"comm": {"local_steps": 3}}, "local_steps", "train.steps to 102"),
        ({"comm": {"local_steps": 4}, "precision": "fp16"}, "local_steps", "bf16"),
        ({"comm": {"overlap": False}, "mesh": {"dp_replicate": 4, "tp": 2}}, "overlap", "dp_replicate"),
        ({"comm": {"overlap": False, "compression": "bf16"}}, "overlap", "leave out"),
    ],
)
def test_local_steps_and_compression_that_cannot_run_are_refused(plan: dict[str, Any], field: str, works: str) -> None:
    sharding = "parameters" if "dp_shard" in plan.get("mesh", {}) else "none"
    data = plan.get("mesh", {}).get("dp_replicate", 8)
    error = refusal({"mesh": {"dp_replicate": 8}, "sharding": sharding, "micro_batch": 32 // data} | plan)
    assert (error.code, error.where) == ("P003", f"plan.comm.{field}")
    assert works in error.fix


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 8}, "sharding": "optimizer", "micro_batch": 4},
        {"mesh": {"dp_shard": 8}, "sharding": "gradients", "micro_batch": 4},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 4, "offload": "parameters"},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 4, "comm": {"reshard": 4}},
        {"mesh": {"dp_replicate": 4, "cp": 2}, "sharding": "parameters", "micro_batch": 8},
        {"mesh": {"dp_replicate": 8}, "micro_batch": 4, "offload": "optimizer", "precision": "fp16"},
        {"mesh": {"dp_replicate": 8}, "micro_batch": 4, "offload": "activations", "recompute": 4},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 4, "comm": {"compression": "int8"}},
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 4},
            "sharding": "gradients",
            "micro_batch": 4,
            "comm": {"compression": "bf16"},
        },
        {"mesh": {"dp_shard": 4, "tp": 2}, "sharding": "parameters", "micro_batch": 8, "comm": {"compression": "int8"}},
        {"mesh": {"dp_replicate": 8}, "micro_batch": 4, "comm": {"compression": {"kind": "topk", "layers": ["mlp"]}}},
        {"mesh": {"dp_replicate": 8}, "micro_batch": 4, "engine": "deepspeed"},
        {
            "mesh": {"dp_shard": 8},
            "micro_batch": 4,
            "engine": "deepspeed",
            "sharding": "optimizer",
            "precision": "bf16",
        },
    ],
)
def test_supported_combinations_of_sharding_offload_and_engine_are_legal(plan: dict[str, Any]) -> None:
    check(plan)


def test_degrees_must_multiply_to_the_devices() -> None:
    error = refusal({"mesh": {"dp_replicate": 3}})
    assert error.code == "P001"
    assert "3 ranks" in error.what
    assert "8xH100 has 8" in error.what
    assert "8 x 1 or 4 x 2 or 2 x 4 or 1 x 8" in error.fix


def test_the_other_axes_must_divide_the_devices() -> None:
    assert "tp x pp x cp to 1 or 2 or 4 or 8, not 3" in refusal({"mesh": {"tp": 3}}).fix
    assert "tp x pp x cp to 1 or 2 or 4 or 8, not 16" in refusal({"mesh": {"tp": 2, "pp": 8}}).fix
    error = refusal({"mesh": {"tp": 2, "cp": 2, "dp_replicate": 4}})
    assert "16 ranks" in error.what
    assert "2 x 1 or 1 x 2 with tp x pp x cp of 4" in error.fix


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 8}},
        {"mesh": {"dp_replicate": 8}, "sharding": "parameters"},
        {"mesh": {"dp_replicate": 8}, "sharding": "optimizer"},
        {"mesh": {"dp_replicate": 4, "tp": 2}, "sharding": "gradients"},
    ],
)
def test_mesh_and_sharding_must_agree(plan: dict[str, Any]) -> None:
    assert refusal(plan).code == "P004"


@pytest.mark.parametrize(
    ("micro_batch", "grad_accum", "fix"),
    [(2, 1, "plan.grad_accum to 2"), (3, 1, "plan.micro_batch to 1 or 2 or 4"), (4, 2, "train.global_batch to 64")],
)
def test_ranks_micro_batch_and_accumulation_must_match_the_global_batch(
    micro_batch: int, grad_accum: int, fix: str
) -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": micro_batch, "grad_accum": grad_accum})
    assert error.code == "P002"
    assert fix in error.fix


def test_sequences_must_not_exceed_the_models_positions() -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": 4}, seq_len=4096)
    assert error.code == "P005"
    assert "2,048" in error.what


def test_an_unknown_model_has_no_positions_to_check() -> None:
    recipe = Recipe(data=DataSection(seq_len=4096))
    check_plan(Plan.model_validate({"mesh": {"dp_replicate": 8}, "micro_batch": 4}), recipe, None, EIGHT)


def test_one_device_shards_only_to_offload_or_for_deepspeed() -> None:
    alone, recipe = parse_cluster("H100"), Recipe()
    for plan in ({"offload": "parameters"}, {"engine": "deepspeed", "precision": "bf16"}):
        whole = {"sharding": "parameters", "micro_batch": 32}
        check_plan(Plan.model_validate(whole | plan), recipe, TINY, alone)
    with pytest.raises(UserError, match="P004"):
        check_plan(Plan.model_validate(whole), recipe, TINY, alone)


@pytest.mark.parametrize(
    ("text", "precision", "works"),
    [
        ("8xA100", "fp8", "fp32 or bf16 or fp16"),
        ("8xV100", "bf16", "fp32 or fp16"),
        ("8xcpu", "fp8", "fp32 or bf16 or fp16"),
    ],
)
def test_an_unsupported_precision_is_refused(text: str, precision: str, works: str) -> None:
    plan = Plan.model_validate({"mesh": {"dp_replicate": 8}, "micro_batch": 4, "precision": precision})
    with pytest.raises(UserError, match=f"P014.*{precision}") as caught:
        check_plan(plan, Recipe(), PRESETS["llama-3-8b"], parse_cluster(text))
    assert works in caught.value.fix


@pytest.mark.parametrize(
    ("text", "precision"), [("8xV100", "fp16"), ("8xA100", "bf16"), ("8xH100", "fp8"), ("8xcpu", "fp16")]
)
def test_a_supported_precision_is_legal(text: str, precision: str) -> None:
    plan = Plan.model_validate({"mesh": {"dp_replicate": 8}, "micro_batch": 4, "precision": precision})
    check_plan(plan, Recipe(), PRESETS["llama-3-8b"], parse_cluster(text))


def test_fp8_needs_large_layers_in_multiples_of_sixteen() -> None:
    wanted = {"mesh": {"dp_replicate": 8}, "micro_batch": 4, "precision": "fp8"}
    assert refusal(wanted).code == "P015"  # tiny is too small
    odd = replace(PRESETS["llama-3-8b"], ffn=14344)
    with pytest.raises(UserError, match=r"P015.*feed-forward.*14344"):
        check_plan(Plan.model_validate(wanted), Recipe(), odd, EIGHT)
    narrow = replace(PRESETS["llama-3-8b"], kv_heads=8, head_dim=16)
    sliced = Plan.model_validate({"mesh": {"tp": 8}, "micro_batch": 32, "precision": "fp8"})
    check_plan(sliced, Recipe(), narrow, EIGHT)
    with pytest.raises(UserError, match=r"P015.*keys.* 8 on each rank"):
        check_plan(sliced, Recipe(), replace(narrow, head_dim=8), EIGHT)


def test_offloaded_parameters_must_be_sharded() -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": 4, "offload": "parameters"})
    assert (error.code, error.where) == ("P016", "plan.offload")


def test_recompute_must_not_exceed_the_number_of_layers() -> None:
    error = refusal({"mesh": {"dp_replicate": 8}, "micro_batch": 4, "recompute": 5})
    assert error.code == "P017"
    assert "1 to 4" in error.fix


@pytest.mark.parametrize(
    ("sharding", "reshard", "fix"),
    [
        ("parameters", 3, "use 2 or 4 or 8"),
        ("optimizer", 2, "set sharding to parameters"),
        ("parameters", 16, "2 or 4"),
    ],
)
def test_weights_are_resharded_only_over_a_divisor_of_the_shards(sharding: str, reshard: int, fix: str) -> None:
    plan = {"mesh": {"dp_shard": 8}, "sharding": sharding, "micro_batch": 4, "comm": {"reshard": reshard}}
    error = refusal(plan)
    assert error.code == "P019"
    assert fix in error.fix


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"tp": 2, "dp_replicate": 4}},
        {"mesh": {"dp_replicate": 8}, "compile": True},
        {"mesh": {"dp_shard": 8}, "sharding": "optimizer", "precision": "fp8"},
        {"mesh": {"dp_shard": 4, "dp_replicate": 2}, "sharding": "parameters"},
        {"mesh": {"dp_shard": 8}, "sharding": "parameters", "offload": "activations"},
    ],
)
def test_settings_that_deepspeed_does_not_support_are_refused(plan: dict[str, Any]) -> None:
    assert refusal(plan | {"engine": "deepspeed"}).code == "P039"


@pytest.mark.parametrize("loss", ["fused", "chunked"])
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"mesh": {"dp_replicate": 4, "tp": 2}, "micro_batch": 8}, "tp splits"),
        ({"mesh": {"dp_replicate": 4, "pp": 2}, "micro_batch": 4, "grad_accum": 2}, "pipeline"),
        ({"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 4, "engine": "deepspeed"}, "DeepSpeed"),
    ],
)
def test_a_head_that_is_split_or_called_by_another_engine_needs_logits(
    plan: dict[str, Any], why: str, loss: str
) -> None:
    check(plan)
    error = refusal(plan | {"loss": loss})
    assert (error.code, error.where) == ("P056", "plan.loss")
    assert why in error.what


def test_a_perception_model_has_no_vocabulary_to_fuse() -> None:
    recipe = Recipe.model_validate({"model": {"family": "perception"}, "train": {"global_batch": 8}})
    plan = Plan.model_validate({"mesh": {"dp_replicate": 8}, "loss": "fused"})
    with pytest.raises(UserError, match="P056"):
        check_plan(plan, recipe, spec_of(recipe.model), EIGHT)
    check_plan(plan.model_copy(update={"loss": "logits"}), recipe, spec_of(recipe.model), EIGHT)

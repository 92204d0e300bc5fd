"""The emitted TOML has torchtitan's fields and the shape of the model."""

import tomllib
from typing import Any

import pytest

from tests.emitted import question
from trimaran.core import Mesh, Pipeline, Plan, UserError
from trimaran.models import PRESETS
from trimaran.planner.emit import emit

# The fields of torchtitan 0.2.2's JobConfig (torchtitan/config/job_config.py of the wheel on PyPI), section by section;
# fields not needed here are left out. torchtitan's ConfigManager has also read these files once, by hand.
FIELDS = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
    "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
    "module_fqns_per_model_part pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
    "pipeline_parallel_microbatch_size context_parallel_degree context_parallel_load_balancer "
    "context_parallel_rotate_method expert_parallel_degree expert_tensor_parallel_degree",
    "activation_checkpoint": "mode selective_ac_option early_stop memory_budget preserve_rng_state debug",
    "compile": "enable components backend",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
    "experimental": "custom_import custom_args_module",
}
SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)
PIPED = Plan(mesh=Mesh(dp_shard=2, tp=2, pp=2), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)


def changed(**fields: Any) -> Plan:
    return Plan.model_validate(SHARDED.model_dump() | fields)


def job(plan: Plan, preset: str = "llama-3.1-8b", **train: Any) -> dict[str, Any]:
    emission = emit("torchtitan", plan, question(preset, "8xH100", plan, **train))
    return tomllib.loads(emission.files["torchtitan.toml"])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_all_fields_exist_in_torchtitan(kind: str) -> None:
    for plan, preset in ((SHARDED, "llama-2-7b"), (PIPED, "llama-3.1-8b"), (changed(mesh=Mesh(dp_shard=8, ep=4)),
                         "qwen3-30b-a3b")):  # fmt: skip
        for section, fields in job(plan, preset, schedule={"kind": kind}).items():
            assert fields.keys() <= set(FIELDS[section].split())


def test_a_pipeline_has_the_ranks_batch_and_lists_its_stages_by_name() -> None:
    piped = job(PIPED.model_copy(update={"pipeline": Pipeline(schedule="interleaved", stages=(9, 8, 8, 7))}))
    assert (piped["training"]["local_batch_size"], piped["training"]["global_batch_size"]) == (8, 16)
    assert piped["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert piped["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    parts = piped["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [10, 8, 8, 9]
    assert (parts[0][0], parts[-1][-3:]) == ("tok_embeddings", ["layers.31", "norm", "output"])


@pytest.mark.parametrize(
    ("recompute", "section"),
    [
        ("none", {"mode": "none"}),
        ("full", {"mode": "full"}),
        ("selective", {"mode": "selective", "selective_ac_option": "op"}),
        (3, {"mode": "selective", "selective_ac_option": "3"}),
    ],
)
def test_recompute_becomes_a_mode(recompute: str | int, section: dict[str, str]) -> None:
    assert job(changed(recompute=recompute))["activation_checkpoint"] == section


def test_fp8_is_a_converter_that_skips_head_and_router() -> None:
    asked = job(changed(precision="fp8", compile=True))
    assert asked["model"]["converters"] == ["quantize.linear.float8"]
    assert asked["quantize"]["linear"]["float8"] == {"filter_fqns": ["output", "router.gate"]}
    assert asked["compile"]["enable"]


def test_a_known_shape_is_a_flavor_and_another_one_becomes_a_module() -> None:
    assert (job(SHARDED)["model"]["name"], job(SHARDED)["model"]["flavor"]) == ("llama3", "8B")
    emission = emit("torchtitan", SHARDED, question("llama-2-7b", "8xH100", SHARDED))
    assert job(SHARDED, "llama-2-7b")["experimental"] == {"custom_import": "trimaran_model"}
    assert 'register_train_spec("trimaran_model"' in emission.files["trimaran_model.py"]


def test_the_module_has_the_exact_feed_forward_width() -> None:
    for preset in ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b"):
        spec = PRESETS[preset]
        text = emit("torchtitan", SHARDED, question(preset, "8xH100", SHARDED)).files["trimaran_model.py"]
        values = dict(line.strip().rstrip(",").split("#")[0].split("=", 1) for line in text.splitlines()
                      if line.startswith("    "))  # fmt: skip
        multiple = int(values["multiple_of"].strip(", "))
        # What its FeedForward does with them (torchtitan/models/llama3/model/model.py).
        width = int(float(values["ffn_dim_multiplier"]) * int(2 * 4 * spec.hidden / 3))
        assert multiple * ((width + multiple - 1) // multiple) == spec.ffn


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"engine": "deepspeed"}, "plan.engine"),
        ({"precision": "fp16"}, "plan.precision"),
        ({"sharding": "optimizer"}, "plan.sharding"),
        ({"mesh": {"dp_replicate": 4, "tp": 2}, "sharding": "none"}, "plan.sharding"),
        ({"mesh": {"cp": 8}, "sharding": "none"}, "plan.sharding"),
        ({"mesh": {"tp": 8}, "sharding": "none"}, "plan.precision"),
        ({"mesh": {"dp_shard": 4, "cp": 2}, "comm": {"context": "exchange"}}, "plan.comm.context"),
        ({"offload": "optimizer"}, "plan.offload"),
        ({"offload": "activations"}, "plan.offload"),
        ({"comm": {"reshard": 4}}, "plan.comm.reshard"),
    ],
)
def test_plans_that_torchtitan_cannot_express_are_refused(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError, match="P061: torchtitan cannot express") as caught:
        job(changed(**change))
    assert caught.value.where == where


def test_models_that_the_tool_does_not_have_are_refused() -> None:
    for preset in ("qwen2.5-7b", "llama-3.2-1b", "tiny-moe"):
        with pytest.raises(UserError, match="P062: torchtitan has no model"):
            job(SHARDED, preset)
    with pytest.raises(UserError, match="P061") as caught:
        job(PIPED, "qwen3-8b")
    assert caught.value.where == "plan.mesh.pp"

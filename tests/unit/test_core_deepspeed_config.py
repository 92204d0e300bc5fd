"""The DeepSpeed config comes from the Plan; what DeepSpeed does not support is refused, never ignored."""

import pytest

from trimaran.core import Mesh, Plan, TrainSection, UserError, deepspeed_config

TRAIN = TrainSection(lr=3e-4, clip_norm=0.5)
SHARDED = Plan(mesh=Mesh(dp_shard=4), sharding="gradients", micro_batch=2, grad_accum=3, engine="deepspeed")


def test_the_complete_configuration_of_a_plan() -> None:
    plan = SHARDED.model_copy(update={"sharding": "parameters", "precision": "bf16", "offload": "parameters"})
    assert deepspeed_config(plan, TRAIN, pin_memory=True) == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 6_553_600,
            "allgather_bucket_size": 6_553_600,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 3e-4,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
                "torch_adam": True,
                "fused": True,
            },
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": True},
    }


@pytest.mark.parametrize(("sharding", "stage"), [("none", 0), ("optimizer", 1), ("gradients", 2), ("parameters", 3)])
def test_sharding_maps_to_a_zero_stage(sharding: str, stage: int) -> None:
    mesh = {"mesh": Mesh(dp_replicate=4)} if sharding == "none" else {}
    plan = SHARDED.model_copy(update={"sharding": sharding, **mesh})
    zero = deepspeed_config(plan, TRAIN)["zero_optimization"]
    assert zero["stage"] == stage
    assert not [key for key in zero if key.startswith("offload")]


def test_only_the_optimizer_can_be_offloaded() -> None:
    zero = deepspeed_config(SHARDED.model_copy(update={"offload": "optimizer"}), TRAIN)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert "offload_param" not in zero


def test_fp16_has_a_dynamic_loss_scale_and_fp32_has_no_section() -> None:
    half = deepspeed_config(SHARDED.model_copy(update={"precision": "fp16"}), TRAIN)
    scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "min_loss_scale": 1}
    assert half["fp16"] == {"enabled": True, "hysteresis": 1, **scale}
    assert not {"fp16", "bf16", "data_types"} & deepspeed_config(SHARDED, TRAIN).keys()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"mesh": Mesh(dp_shard=2, tp=2)}, "plan.mesh.tp"),
        ({"mesh": Mesh(dp_shard=2, pp=2)}, "plan.mesh.pp"),
        ({"mesh": Mesh(dp_shard=2, cp=2)}, "plan.mesh.cp"),
        ({"mesh": Mesh(dp_shard=2, ep=2)}, "plan.mesh.ep"),
        ({"mesh": Mesh(dp_replicate=2, dp_shard=2)}, "plan.mesh.dp_replicate"),
        ({"sharding": "none"}, "plan.mesh.dp_shard"),
        ({"sharding": "none", "precision": "bf16", "mesh": Mesh()}, "plan.sharding"),
        ({"sharding": "none", "offload": "optimizer", "mesh": Mesh()}, "plan.offload"),
        ({"offload": "parameters"}, "plan.offload"),
        ({"offload": "activations"}, "plan.offload"),
        ({"precision": "fp8"}, "plan.precision"),
        ({"compile": True}, "plan.compile"),
        ({"comm": SHARDED.comm.model_copy(update={"local_steps": 8})}, "plan.comm.local_steps"),
        ({"comm": SHARDED.comm.model_copy(update={"compression": "topk"})}, "plan.comm.compression"),
        ({"comm": SHARDED.comm.model_copy(update={"reshard": "never"})}, "plan.comm.reshard"),
        ({"comm": SHARDED.comm.model_copy(update={"prefetch": 2})}, "plan.comm.prefetch"),
    ],
)
def test_plan_fields_that_deepspeed_does_not_support_are_refused(change: dict[str, object], where: str) -> None:
    with pytest.raises(UserError, match="P039") as caught:
        deepspeed_config(SHARDED.model_copy(update=change), TRAIN)
    assert caught.value.where == where
    assert "plan.engine to torch" in caught.value.fix


@pytest.mark.parametrize(
    ("train", "where"),
    [
        ({"optimizer": {"states": "8bit"}}, "train.optimizer.states"),
        ({"precision": {"lm_head": "fp32"}}, "train.precision"),
    ],
)
def test_recipe_fields_that_deepspeed_does_not_support_are_refused(train: dict[str, object], where: str) -> None:
    with pytest.raises(UserError, match="P039") as caught:
        deepspeed_config(SHARDED.model_copy(update={"precision": "bf16"}), TrainSection.model_validate(train))
    assert caught.value.where == where


def test_single_modules_in_fp16_are_refused_because_they_have_no_loss_scale() -> None:
    train = TrainSection.model_validate({"precision": {"lm_head": "fp16"}})
    with pytest.raises(UserError, match="P039") as caught:
        deepspeed_config(SHARDED.model_copy(update={"precision": "fp32"}), train)
    assert caught.value.where == "train.precision"

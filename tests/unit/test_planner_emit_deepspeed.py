"""DeepSpeed itself reads the emitted JSON, with as many data ranks as the command starts."""

import json
from typing import Any

import pytest

from tests.emitted import question, started
from trimaran.core import Mesh, Plan, UserError
from trimaran.planner.emit import emit

SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets DeepSpeed read the emitted JSON for as many ranks as the command starts."""

    def configure(plan: Plan, cluster: str = "8xH100") -> Any:
        from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415  it takes seconds to import

        emission = emit("deepspeed", plan, question("llama-3.1-8b", cluster, plan))
        monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
        monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: started(emission.command))
        return DeepSpeedConfig(json.loads(emission.files["ds_config.json"]))

    return configure


@pytest.mark.parametrize(("sharding", "stage"), [("optimizer", 1), ("gradients", 2), ("parameters", 3)])
def test_deepspeed_reads_the_plans_batch_stage_and_precision(sharding: str, stage: int, read: Any) -> None:
    config = read(SHARDED.model_copy(update={"sharding": sharding, "offload": "optimizer"}))
    assert config.train_batch_size == 64
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (2, 4)
    assert config.zero_config.stage == stage
    assert config.zero_config.offload_optimizer.pin_memory
    assert config.bfloat16_config.enabled


def test_a_plan_for_engine_torch_is_emitted_too_and_compile_is_left_to_the_script() -> None:
    plan = SHARDED.model_copy(update={"compile": True, "recompute": "full"})
    emission = emit("deepspeed", plan, question("llama-3.1-8b", "8xH100", plan))
    assert emission.command == (
        "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds_config.json --gradient_checkpointing"
    )
    assert any("engine.compile()" in note for note in emission.notes)


def test_several_nodes_are_listed_in_a_hostfile(read: Any) -> None:
    plan = SHARDED.model_copy(update={"mesh": Mesh(dp_shard=32)})
    assert read(plan, "4x8xH100").train_batch_size == 256
    emission = emit("deepspeed", plan, question("llama-3.1-8b", "4x8xH100", plan))
    assert emission.files["hostfile"].splitlines() == [f"node-{rank} slots=8" for rank in range(4)]
    assert "--hostfile hostfile --num_nodes 4" in emission.command


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"mesh": Mesh(dp_shard=4, tp=2)}, "plan.mesh.tp"),
        ({"mesh": Mesh(dp_shard=4, pp=2)}, "plan.mesh.pp"),
        ({"mesh": Mesh(dp_shard=4, cp=2)}, "plan.mesh.cp"),
        ({"mesh": Mesh(dp_shard=8, ep=2)}, "plan.mesh.ep"),
        ({"mesh": Mesh(dp_replicate=2, dp_shard=4)}, "plan.mesh.dp_replicate"),
        ({"precision": "fp8"}, "plan.precision"),
        ({"offload": "activations"}, "plan.offload"),
        ({"recompute": "selective"}, "plan.recompute"),
    ],
)
def test_plans_that_deepspeed_cannot_express_are_refused(change: dict[str, Any], where: str) -> None:
    plan = SHARDED.model_copy(update=change)
    with pytest.raises(UserError, match=r"P061: deepspeed cannot express .+: ") as caught:
        emit("deepspeed", plan, question("llama-3.1-8b", "8xH100", plan))
    assert caught.value.where == where
    assert "plan.engine" not in caught.value.fix

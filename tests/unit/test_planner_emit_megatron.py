"""The emitted script has Megatron's arguments, and its layout contains every layer."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.emitted import command_options, question
from trimaran.core import Mesh, Pipeline, Plan, UserError
from trimaran.planner.emit import emit

# Copied from megatron/training/arguments.py of NVIDIA/Megatron-LM at commit 000c4ac24f61159c138b0975def722c65245983c:
# what takes a value, and what is a flag.
VALUES = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups seq-length
max-position-embeddings position-embedding-type rotary-base rope-scaling-factor normalization norm-epsilon
padded-vocab-size attention-dropout hidden-dropout num-experts moe-router-topk moe-ffn-hidden-size
moe-shared-expert-intermediate-size moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff
moe-token-dispatcher-type tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size cp-comm-type
expert-model-parallel-size expert-tensor-parallel-size num-distributed-optimizer-instances
pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage microbatch-group-size-per-virtual-pipeline-stage
micro-batch-size global-batch-size train-iters seed initial-loss-scale loss-scale-window hysteresis fp8-format
fp8-recipe recompute-granularity recompute-method recompute-num-layers recompute-modules optimizer adam-beta1
adam-beta2 adam-eps weight-decay clip-grad exp-avg-dtype exp-avg-sq-dtype lr min-lr lr-warmup-iters lr-decay-style
lr-decay-iters lr-wsd-decay-style lr-wsd-decay-iters tokenizer-type tokenizer-model data-path save load save-interval
"""
FLAGS = """
group-query-attention use-rope-scaling swiglu disable-bias-linear add-qkv-bias qk-layernorm
untie-embeddings-and-output-weights moe-router-pre-softmax moe-grouped-gemm sequence-parallel overlap-grad-reduce
use-distributed-optimizer overlap-param-gather calculate-per-token-loss bf16 fp16 accumulate-allreduce-grads-in-fp32
use-precision-aware-optimizer optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d
"""
SLICED = Plan(mesh=Mesh(dp_shard=2, tp=2, pp=2), sharding="optimizer", precision="bf16", micro_batch=1, grad_accum=8)


def changed(**fields: Any) -> Plan:
    return Plan.model_validate(SLICED.model_dump() | fields)


def options(plan: Plan, preset: str = "llama-3.1-8b", cluster: str = "8xH100", **train: Any) -> dict[str, str]:
    text = emit("megatron", plan, question(preset, cluster, plan, **train)).files["pretrain.sh"]
    return command_options(text.partition('/pretrain_gpt.py" ')[2].replace("\\\n", " ").join(["pretrain_gpt.py ", ""]))


@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "llama-3.2-1b"])
@pytest.mark.parametrize("kind", ["wsd", "constant"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"precision": "fp16", "recompute": "full"},
        {"mesh": {"dp_shard": 4, "tp": 2}, "precision": "fp8", "recompute": 2, "offload": "optimizer"},
        {"pipeline": {"schedule": "interleaved"}, "grad_accum": 9, "recompute": "selective"},
        {"mesh": {"dp_replicate": 2, "dp_shard": 2, "cp": 2}},
    ],
)
def test_all_arguments_exist_in_megatron(preset: str, kind: str, change: dict[str, Any]) -> None:
    for name, value in options(changed(**change), preset, schedule={"kind": kind}).items():
        if name.startswith("--"):
            assert name.removeprefix("--") in (VALUES if value else FLAGS).split()


def test_the_arguments_have_the_shape_of_the_model() -> None:
    given = options(SLICED, "qwen2.5-7b")
    assert (given["--num-layers"], given["--hidden-size"], given["--ffn-hidden-size"]) == ("28", "3584", "18944")
    assert (given["--num-attention-heads"], given["--num-query-groups"], given["--kv-channels"]) == ("28", "4", "128")
    assert {"--add-qkv-bias", "--untie-embeddings-and-output-weights", "--swiglu"} <= given.keys()
    assert not {"--qk-layernorm", "--use-rope-scaling", "--num-experts"} & given.keys()
    assert "--untie-embeddings-and-output-weights" not in options(SLICED, "llama-3.2-1b")
    assert options(SLICED, "llama-3.2-1b")["--rope-scaling-factor"] == "32.0"


def test_expert_routing_matches_ours() -> None:
    given = options(changed(mesh={"dp_shard": 4, "tp": 2, "ep": 4}), "qwen3-30b-a3b")
    assert (given["--num-experts"], given["--moe-router-topk"], given["--moe-ffn-hidden-size"]) == ("128", "8", "768")
    assert (given["--expert-model-parallel-size"], given["--expert-tensor-parallel-size"]) == ("4", "2")
    assert given["--moe-router-load-balancing-type"] == "seq_aux_loss"
    assert "--moe-grouped-gemm" in given


@pytest.mark.parametrize(
    ("stages", "layout"),
    [
        ((17, 15), [["E"] + ["t"] * 17, ["t"] * 15 + ["L"]]),
        ((9, 8, 8, 7), [["E"] + ["t"] * 9, ["t"] * 8, ["t"] * 8, ["t"] * 7 + ["L"]]),
    ],
)
def test_uneven_stages_become_a_layout(stages: tuple[int, ...], layout: list[list[str]]) -> None:
    schedule = "1f1b" if len(stages) == 2 else "interleaved"
    given = options(changed(pipeline=Pipeline(schedule=schedule, stages=stages)))["--pipeline-model-parallel-layout"]
    unrolled = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), given.replace(",", ""))
    assert [list(stage) for stage in unrolled.split("|")] == layout


def test_even_stages_need_no_layout() -> None:
    plain = options(changed(pipeline={"stages": (16, 16)}))
    woven = options(changed(pipeline={"schedule": "interleaved", "stages": (8, 8, 8, 8)}, grad_accum=9))
    assert not {"--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"} & plain.keys()
    assert woven["--num-layers-per-virtual-pipeline-stage"] == "8"


def test_interleaved_rounds_match_ours() -> None:
    plan = changed(mesh={"dp_shard": 2, "pp": 4}, pipeline={"schedule": "interleaved"}, grad_accum=10)
    assert options(plan)["--microbatch-group-size-per-virtual-pipeline-stage"] == "5"
    assert "--microbatch-group-size-per-virtual-pipeline-stage" not in options(
        plan.model_copy(update={"grad_accum": 8})
    )


def test_tp_sets_one_cuda_connection() -> None:
    for mesh, wanted in ((Mesh(dp_shard=4, tp=2), True), (Mesh(dp_shard=4, cp=2), True), (Mesh(dp_shard=8), False)):
        plan = changed(mesh=mesh)
        text = emit("megatron", plan, question("llama-3.1-8b", "8xH100", plan)).files["pretrain.sh"]
        assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in text) is wanted


def test_low_precision_moments_and_offload_use_the_precision_aware_optimizer() -> None:
    given = options(changed(offload="optimizer"), optimizer={"states": "bf16"})
    assert (given["--exp-avg-dtype"], given["--exp-avg-sq-dtype"]) == ("bf16", "bf16")
    assert {"--use-precision-aware-optimizer", "--optimizer-cpu-offload"} <= given.keys()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sharding": "gradients"}, "plan.sharding"),
        ({"sharding": "parameters"}, "plan.sharding"),
        ({"engine": "deepspeed"}, "plan.engine"),
        ({"offload": "parameters"}, "plan.offload"),
        ({"offload": "activations"}, "plan.offload"),
        ({"offload": "optimizer", "sharding": "none", "mesh": {"dp_replicate": 8}}, "plan.sharding"),
        ({"pipeline": {"schedule": "zero-bubble"}}, "plan.pipeline.schedule"),
        ({"pipeline": {"schedule": "gpipe"}}, "plan.pipeline.schedule"),
        ({"recompute": 3, "pipeline": {"stages": (17, 15)}}, "plan.recompute"),
    ],
)
def test_plans_that_megatron_cannot_express_are_refused(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError, match="P061: megatron cannot express") as caught:
        options(changed(**change))
    assert caught.value.where == where


def test_models_that_the_tool_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match="P062: megatron has no model for tiny-moe: its shared expert has no gate"):
        options(changed(mesh={"dp_shard": 8}), "tiny-moe")
    foreign = replace(question("llama-3.1-8b", "8xH100", SLICED), spec=None)
    with pytest.raises(UserError, match="P062"):
        emit("megatron", SLICED, foreign)

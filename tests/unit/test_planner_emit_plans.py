"""Every legal plan is emitted unchanged or refused with a code: nothing is silently dropped."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.emitted import READERS, expected, question
from trimaran.core import Mesh, Pipeline, Plan, UserError
from trimaran.planner import Question, check_plan
from trimaran.planner.emit import EMITTERS, emit

CLUSTERS = {"1xH100": 1, "2xA100-80GB": 2, "8xH100": 8, "2x8xH100": 16, "8x8xH100": 64}
PRESETS = ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-30b-a3b")
SHARDED = Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", micro_batch=2, grad_accum=4)


# Half of the plans are drawn from what the tool is likely to support; otherwise nearly all would be refused.
ZERO = {"axes": ("dp_replicate",), "recompute": ("none", "full"), "reshard": ("auto",)}
HOME: dict[str, dict[str, tuple[Any, ...]]] = {
    "accelerate": ZERO | {"axes": ("cp", "tp", "dp_replicate"), "context": ("gather",), "offload": ("none",)},
    "deepspeed": ZERO | {"axes": (), "offload": ("none", "optimizer", "parameters"), "engine": ("torch", "deepspeed")},
    "hf-trainer": ZERO | {"axes": ("cp", "dp_replicate"), "context": ("gather",), "offload": ("none", "parameters"),
                          "precision": ("bf16", "fp32"), "sharding": ("gradients", "parameters"), "engine": ("torch",)},
    "torchtitan": {"precision": ("bf16", "fp8"), "offload": ("none", "parameters"), "engine": ("torch",),
                   "context": ("gather",), "sharding": ("gradients", "parameters")},
    "megatron": {"sharding": ("optimizer",), "offload": ("none", "optimizer"), "engine": ("torch",)},
}  # fmt: skip
ANYWHERE: dict[str, tuple[Any, ...]] = {
    "axes": ("tp", "pp", "cp", "dp_replicate"),
    "sharding": ("optimizer", "gradients", "parameters"),
    "precision": ("bf16", "fp32", "fp16", "fp8"),
    "recompute": ("none", "selective", "full", 1, 3),
    "offload": ("none", "optimizer", "parameters", "activations"),
    "reshard": ("auto", "always", "never"),
    "context": ("gather", "exchange"),
    "engine": ("torch", "deepspeed"),
}


@st.composite
def meshes(draw: st.DrawFn, world_size: int, axes: tuple[str, ...]) -> Mesh:
    """Draw degrees that multiply to the world size, seldom many at once."""
    left, split = world_size, {}
    for axis in draw(st.permutations(axes)):
        split[axis] = draw(st.sampled_from([1, 1, *(2**power for power in range(1, int(math.log2(left)) + 1))]))
        left //= split[axis]
    return Mesh(**split, dp_shard=left, ep=draw(st.sampled_from([1, 1, 1, 2, 4])))


@st.composite
def plan_and_question(draw: st.DrawFn, tool: str) -> tuple[Plan, Question]:
    """Draw a legal plan with its question."""
    cluster = draw(st.sampled_from(sorted(CLUSTERS)))
    choices = ANYWHERE | draw(st.sampled_from([{}, HOME[tool]]))
    wide = {name: st.sampled_from(values) for name, values in choices.items() if values}
    axes = draw(st.sampled_from([ANYWHERE["axes"], HOME[tool].get("axes", ANYWHERE["axes"])]))
    mesh = draw(meshes(CLUSTERS[cluster], axes))
    plan = Plan.model_validate({
        "mesh": mesh,
        "sharding": draw(wide["sharding"]) if mesh.shards > 1 or draw(st.booleans()) else "none",
        "pipeline": Pipeline(schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))),
        "micro_batch": draw(st.integers(1, 4)),
        "grad_accum": draw(st.sampled_from([1, 2, 4, 8, 12, 16])),
        "compile": draw(st.booleans()),
        "comm": {"reshard": draw(wide["reshard"]), "context": draw(wide["context"])},
        **{field: draw(wide[field]) for field in ("precision", "recompute", "offload", "engine")},
    })  # fmt: skip
    ask = question(draw(st.sampled_from(PRESETS)), cluster, plan)
    try:
        check_plan(plan, ask.recipe, ask.spec, ask.cluster)
    except UserError:
        assume(False)
    return plan, ask


@pytest.mark.parametrize("tool", EMITTERS)
def test_a_legal_plan_is_emitted_as_it_is_or_refused(tool: str) -> None:
    emitted: list[Plan] = []
    refused: list[tuple[str, bool]] = []

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=plan_and_question(tool))
    def check_emission(case: tuple[Plan, Question]) -> None:
        try:
            emission = emit(tool, *case)
        except UserError as error:
            refused.append((error.code, tool in error.what))
            return
        assert READERS[tool](emission) == expected(case[0])
        emitted.append(case[0])

    check_emission()
    assert set(refused) <= {("P061", True), ("P062", True), ("P063", True)}
    assert len(emitted) >= 4, "too few were emitted to prove much"


def test_every_fsdp_tool_can_express_an_fsdp_plan() -> None:
    for tool in ("accelerate", "hf-trainer", "torchtitan", "deepspeed"):
        assert READERS[tool](emit(tool, SHARDED, question("llama-3.1-8b", "8xH100", SHARDED))) == expected(SHARDED)


def test_an_unknown_tool_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"P060.*did you mean 'megatron'") as caught:
        emit("megatorn", SHARDED, question("llama-3.1-8b", "8xH100", SHARDED))
    assert caught.value.fix == "use accelerate, deepspeed, hf-trainer, torchtitan, megatron"


@pytest.mark.parametrize("tool", EMITTERS)
def test_settings_that_no_tool_has_are_refused_by_all(tool: str) -> None:
    sharding = "optimizer" if tool == "megatron" else "parameters"
    plan = SHARDED.model_copy(update={"sharding": sharding})
    ask = question("llama-3.1-8b", "8xH100", plan, precision={"lm_head": "fp32"})
    with pytest.raises(UserError, match="P063") as caught:
        emit(tool, plan, ask)
    assert caught.value.where == "train.precision"
    with pytest.raises(UserError, match="P061") as caught:
        emit(tool, plan.model_copy(update={"towers": {"vision": {}}}), question("llama-3.1-8b", "8xH100", plan))
    assert caught.value.where == "plan.towers"
    assert caught.value.fix == "set plan.towers to {}, or emit for another tool"


@pytest.mark.parametrize("tool", EMITTERS)
def test_low_precision_moments_are_refused_where_the_tool_cannot_express_them(tool: str) -> None:
    plan = SHARDED.model_copy(update={"sharding": "optimizer" if tool == "megatron" else "parameters"})
    states = "bf16" if tool == "hf-trainer" else "8bit"
    with pytest.raises(UserError, match="P063") as caught:
        emit(tool, plan, question("llama-3.1-8b", "8xH100", plan, optimizer={"states": states}))
    assert caught.value.where == "train.optimizer.states"

"""Gathering inputs again in backward: what it saves and costs by prediction, and where the planner uses it."""

from typing import Any

import pytest

from trimaran.core import GIB, Plan, Recipe, UserError
from trimaran.cost import find_stack, peak_memory_of, predict
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question, check_plan, search

MODEL, CLUSTER, SEQ_LEN = PRESETS["llama-3.1-70b"], parse_cluster("8xH100"), 8192


def question_of(plan: Any = "auto", model: str = "llama-3.1-70b", cluster: str = "8xH100", batch: int = 8) -> Question:
    recipe = Recipe.model_validate(
        {"model": {"preset": model}, "data": {"seq_len": SEQ_LEN}, "train": {"global_batch": batch}, "plan": plan}
    )
    spec = PRESETS[model]
    return Question(recipe=recipe, spec=spec, outline=outline_of(spec), cluster=parse_cluster(cluster))


def plan_of(regather: bool, **fields: Any) -> Plan:
    tree = {"mesh": {"tp": 8}, "precision": "bf16", "compile": True, "grad_accum": 8, "comm": {"regather": regather}}
    return Plan.model_validate(tree | fields)


def activations(plan: Plan, stack: str = "trimaran") -> int:
    question = question_of()
    job = question.job if stack == "trimaran" else Question(
        recipe=question.recipe, spec=None, outline=question.outline, cluster=CLUSTER, stack=find_stack(stack)
    ).job  # fmt: skip
    return peak_memory_of(job, CLUSTER, plan).terms["activations"]


def test_seven_eighths_of_the_inputs_are_not_saved_but_one_is_gathered_at_a_time() -> None:
    inputs = 2 * SEQ_LEN * MODEL.hidden * 2  # of one layer: two, in 16 bits
    saved = activations(plan_of(False)) - activations(plan_of(True))
    assert saved == pytest.approx(MODEL.layers * inputs * 7 / 8 - inputs / 2, rel=0.01)
    assert saved > 0.4 * activations(plan_of(False)), "about half of what is saved, at tp 8"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_gathers_again_in_any_case(recompute: str) -> None:
    before, after = (predict(question_of().job, CLUSTER, plan_of(each, recompute=recompute)) for each in (False, True))
    assert (before.peak_bytes, before.step_seconds) == (after.peak_bytes, after.step_seconds)


def test_without_tensor_parallelism_or_in_other_stacks_nothing_changes() -> None:
    alone = {"mesh": {"dp_shard": 8}, "sharding": "parameters", "grad_accum": 1}
    assert activations(plan_of(True, **alone)) == activations(plan_of(False, **alone))
    assert activations(plan_of(True), "megatron") == activations(plan_of(False), "megatron")


def test_one_gather_of_each_input_is_added_and_an_eager_block_hides_most_of_it() -> None:
    job = question_of().job

    def added(**fields: Any) -> float:
        before, after = (predict(job, CLUSTER, plan_of(each, **fields)) for each in (False, True))
        return after.time["comm"] - before.time["comm"]

    comm = predict(job, CLUSTER, plan_of(False)).time["comm"]
    assert added() == pytest.approx(comm / 4, rel=0.05)  # forward and backward each gather and scatter
    assert 0 < added(compile=False) < 0.5 * added()
    half = added(recompute=2)
    assert half == pytest.approx(added() / 2, rel=0.05)


def test_the_planner_gathers_again_where_memory_is_short_and_says_so() -> None:
    pins = {"mesh": {"tp": 8, "dp_shard": 8}, "sharding": "parameters", "micro_batch": 2, "recompute": "none"}
    answer = search(question_of(pins, cluster="8x8xH100", batch=64))
    best = answer.ranked[0]
    assert best.comm.regather
    assert "inputs gathered again" in str(best)
    assert best.prediction is not None
    assert best.prediction.fits
    whole = next(miss for miss in answer.misses if not miss.plan.comm.regather and miss.plan.recompute == "none")
    assert whole.plan.prediction is not None
    assert not whole.plan.prediction.fits
    assert whole.plan.prediction.peak_bytes > best.prediction.peak_bytes + 8 * GIB


def test_the_planner_keeps_inputs_where_memory_suffices_and_keeps_a_pin() -> None:
    pins = {"mesh": {"tp": 2, "dp_shard": 4}, "micro_batch": 1, "recompute": "none"}
    assert not search(question_of(pins, model="llama-3.2-1b", batch=64)).ranked[0].comm.regather
    pinned = pins | {"comm": {"regather": True}}
    assert search(question_of(pinned, model="llama-3.2-1b", batch=64)).ranked[0].comm.regather


def test_models_that_gather_nothing_and_compiled_experts_are_refused() -> None:
    cluster, spec = parse_cluster("2xcpu"), PRESETS["tiny-moe"]
    plan = Plan.model_validate({"mesh": {"tp": 2}, "comm": {"regather": True}, "grad_accum": 8})
    experts = Recipe.model_validate({"model": {"preset": "tiny-moe"}, "train": {"global_batch": 8}})
    check_plan(plan, experts, spec, cluster)
    with pytest.raises(UserError, match=r"P058.*experts"):
        check_plan(plan.model_copy(update={"compile": True}), experts, spec, cluster)
    hf = Recipe.model_validate({"model": {"family": "hf", "path": "x"}, "train": {"global_batch": 8}})
    with pytest.raises(UserError, match=r"P058.*family hf"):
        check_plan(plan, hf, None, cluster)

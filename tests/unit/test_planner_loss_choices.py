"""The planner chooses how the loss is computed: fused, chunked if memory is short, or as pinned."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.test_planner_search import question_for
from trimaran.core import GIB, Bytes, Plan, Recipe, UserError
from trimaran.cost import find_stack, predict
from trimaran.machine import Cluster, parse_cluster
from trimaran.models import PRESETS, ModelSpec, Outline, outline_from_hf
from trimaran.planner import Question, choose, predict_line, search

GEMMA_2_2B = {
    "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000,
}  # fmt: skip
EIGHT_B = PRESETS["llama-3.1-8b"]


def plan_for(spec: ModelSpec, text: str, *, batch: int, seq_len: int = 4096, **pins: Any) -> Plan:
    wish = {"data": {"seq_len": seq_len}, "train": {"global_batch": batch}}
    recipe = Recipe.model_validate(wish | ({"plan": pins} if pins else {}))
    return choose(recipe, spec, parse_cluster(text))


def test_the_loss_is_fused_unless_tp_or_pp_split_the_model() -> None:
    one_b = PRESETS["llama-3.2-1b"]
    assert plan_for(one_b, "H200", batch=4).loss == "fused"
    assert plan_for(PRESETS["tiny"], "2xcpu", batch=4, seq_len=64).loss == "fused"
    assert plan_for(one_b, "8xH100", batch=64).loss == "fused"
    for mesh in ({"tp": 2}, {"pp": 2}):
        assert plan_for(one_b, "2xH100", batch=8, mesh=mesh).loss == "logits"
    assert plan_for(one_b, "H200", batch=4, sharding="optimizer", engine="deepspeed").loss == "logits"


@pytest.mark.parametrize("loss", ["logits", "fused", "chunked"])
def test_a_pinned_loss_stays_and_rules_out_tp_and_pp(loss: str) -> None:
    plan = plan_for(PRESETS["llama-3.1-8b"], "4xH100", batch=16, loss=loss)
    assert plan.loss == loss
    assert loss == "logits" or plan.mesh.tp == plan.mesh.pp == 1


def test_other_stacks_compute_logits() -> None:
    question = replace(
        question_for(EIGHT_B, "2xH100", batch=16, seq_len=4096), for_trainer=False, stack=find_stack("megatron")
    )
    assert {plan.loss for plan in search(question).ranked} == {"logits"}


def gemma(**fields: Any) -> Outline:
    return outline_from_hf(GEMMA_2_2B | fields, where="config.json", name="gemma")


def about(outline: Outline, **pins: Any) -> Question:
    tree = {"data": {"seq_len": 4096}, "train": {"global_batch": 4}, "model": {"family": "hf", "path": "gemma"}}
    recipe = Recipe.model_validate(tree | ({"plan": pins} if pins else {}))
    return Question(recipe=recipe, spec=None, outline=outline, cluster=parse_cluster("H200"))


@pytest.mark.parametrize("trains", [True, False], ids=["trainer", "any stack"])
def test_a_model_with_capped_logits_is_planned_and_costed_with_logits(trains: bool) -> None:
    question = replace(about(gemma(), micro_batch=1), for_trainer=trains)
    best = search(question).ranked[0]
    assert best.loss == "logits"
    assert search(replace(question, outline=gemma(final_logit_softcapping=None))).ranked[0].loss != "logits"
    wished = predict(question.job, question.cluster, best.model_copy(update={"loss": "fused"}))
    assert wished == best.prediction, "the trainer keeps the logits of such a plan as well"


@pytest.mark.parametrize(("loss", "trains"), [("fused", True), ("chunked", False)])
def test_a_fused_loss_is_refused_for_a_model_with_capped_logits(loss: str, trains: bool) -> None:
    question = replace(about(gemma(), loss=loss), for_trainer=trains)
    with pytest.raises(UserError, match=r"P056.*logits are more than one matmul"):
        search(question)
    assert search(replace(question, outline=gemma(final_logit_softcapping=None))).ranked[0].loss == loss
    assert search(replace(question, for_trainer=False, stack=find_stack("torchtitan"))).ranked, (
        "it has a loss of its own"
    )


def test_the_loss_is_chunked_if_full_logits_would_fill_the_device() -> None:
    pins = {"micro_batch": 4, "offload": "none", "recompute": "none"}
    question = question_for(PRESETS["llama-3.2-3b"], "H200", batch=4, seq_len=4096, plan=pins)
    job, plan = question.job, plan_for(PRESETS["llama-3.2-3b"], "H200", batch=4, **pins)
    fused_bytes, chunked_bytes = (
        predict(job, question.cluster, plan.model_copy(update={"loss": each})).device_bytes
        for each in ("fused", "chunked")
    )
    assert fused_bytes > chunked_bytes + GIB

    def best(most: float) -> Plan:
        device = replace(question.cluster.device, memory_bytes=Bytes(int(most)))
        return search(replace(question, cluster=Cluster(device=device))).ranked[0]

    assert best(fused_bytes / 0.85).loss == "fused"
    assert best(fused_bytes / 0.99).loss == "chunked"  # the allocator would slow down a step with the fused loss
    assert best(chunked_bytes / 0.99).loss == "chunked"  # nothing else fits


def test_8b_trains_on_one_h200_without_offload() -> None:
    for batch in (1, 8):
        plan = plan_for(EIGHT_B, "H200", batch=batch)
        assert plan.prediction is not None
        assert (plan.offload, plan.mesh.world_size) == ("none", 1)
        assert plan.prediction.device_bytes < 0.9 * 150.1e9, "room for what was not foreseen"
        # Split weights, moments and gradients take 14 bytes. Accumulation would add 2 more.
        held = sum(plan.prediction.memory[term] for term in ("weights", "masters", "optimizer"))
        assert held == 12 * EIGHT_B.num_parameters
    assert plan_for(EIGHT_B, "H200", batch=1).recompute == "none"


def test_an_answer_shows_the_loss_and_the_cost_of_another_one() -> None:
    answer = search(question_for(PRESETS["llama-3.2-1b"], "H200", batch=4, seq_len=4096))
    assert "loss fused" in str(answer.ranked[0])
    (miss,) = (each for each in answer.misses if each.plan.loss == "logits" and each.plan.mesh == answer.ranked[0].mesh)
    assert "loss logits" in miss.why


def test_a_line_of_predict_defaults_to_logits() -> None:
    model = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128_256, "seq_len": 4096}
    line = {"model": model, "cluster": {"gpu": "H200", "gpus": 1}}
    peaks = [predict_line(line | {"plan": {"micro_batch": 4} | loss})["peak_bytes"]
            for loss in ({}, {"loss": "logits"}, {"loss": "fused"}, {"loss": "chunked"})]  # fmt: skip
    assert peaks[0] == peaks[1] > peaks[2] > peaks[3]


def test_a_line_of_predict_with_an_impossible_loss_is_answered_with_logits_and_why() -> None:
    model = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128_256, "seq_len": 4096}
    line = {"model": model, "cluster": {"gpu": "H200", "gpus": 2}}
    cut = {"mesh": {"tp": 2}, "micro_batch": 4}
    wished, plain = (predict_line(line | {"plan": cut | loss}) for loss in ({"loss": "fused"}, {}))
    assert "tp splits the vocabulary" in wished["why"]
    assert (wished["fits"], wished["peak_bytes"]) == (False, plain["peak_bytes"])
    assert predict_line(line | {"plan": cut | {"loss": "fused"}, "stack": "torchtitan"})["fits"]

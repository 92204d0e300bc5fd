"""The memory ladder: which plan change follows an OOM, and which one is the cheapest."""

from typing import Any

from trimaran.core import Plan, Recipe
from trimaran.hardware import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question
from trimaran.planner.memory_ladder import cheapest_first, next_rung, plan_bytes, plan_with


def question_for(preset: str, cluster: str, *, batch: int, seq_len: int) -> Question:
    recipe = Recipe.model_validate({"data": {"seq_len": seq_len}, "train": {"global_batch": batch}})
    spec = PRESETS[preset]
    return Question(recipe=recipe, spec=spec, outline=outline_of(spec), cluster=parse_cluster(cluster))


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate({"precision": "bf16"} | fields)


def test_without_a_prediction_the_micro_batch_shrinks_first_and_recompute_is_last() -> None:
    plan, seen = plan_of(micro_batch=4), []
    while rung := next_rung(plan):
        plan, text = rung
        seen.append(text)
    assert seen == [
        "micro-batch 4 -> 2, accumulation 1 -> 2",
        "micro-batch 2 -> 1, accumulation 2 -> 4",
        "recompute none -> full",
    ]


def test_a_rung_that_saves_enough_is_taken_in_the_order_of_the_rule() -> None:
    question = question_for("llama-3.2-1b", "1xH200", batch=16, seq_len=4096)
    rung = next_rung(plan_of(micro_batch=16), question)
    assert rung is not None
    assert rung[1] == "micro-batch 16 -> 8, accumulation 1 -> 2"
    assert rung[0].global_batch == 16
    assert rung[0].prediction is None


def test_with_one_sample_the_least_recompute_that_saves_enough_is_tried_first() -> None:
    question = question_for("llama-3.2-1b", "1xH200", batch=1, seq_len=32_768)
    rung = next_rung(plan_of(micro_batch=1), question)
    assert rung is not None
    assert rung[1] == "recompute none -> selective"


def test_if_no_rung_saves_enough_the_rule_decides() -> None:
    question = question_for("llama-3.1-8b", "1xH200", batch=4, seq_len=512)
    plan = plan_of(micro_batch=4, compile=True, loss="fused")
    rung = next_rung(plan, question)
    assert rung is not None
    every = next_rung(plan)
    assert every is not None
    assert every[1].startswith("micro-batch 4 -> 2")
    # Weights and moments dominate, so no micro-batch saves 8 %: the rule decides as without a prediction.
    assert rung == every


def test_an_illegal_rung_is_skipped() -> None:
    question = question_for("llama-3.1-8b", "4xH100", batch=8, seq_len=4096)
    plan = plan_of(mesh={"pp": 4}, pipeline={"schedule": "zero-bubble"}, micro_batch=2, grad_accum=4)
    rung = next_rung(plan, question)
    assert rung is not None
    assert rung[0].recompute == "none"


def test_the_cheapest_change_that_fits_comes_first_and_all_of_them_fit() -> None:
    question = question_for("llama-3.2-1b", "8xH100", batch=64, seq_len=4096)
    plan, total = plan_of(mesh={"dp_replicate": 8}, micro_batch=8), 80e9
    rungs = cheapest_first(plan, question, needed_bytes=total, device_bytes=total)
    seconds = [rung.prediction.step_seconds for rung in rungs]
    assert seconds == sorted(seconds)
    assert {field for rung in rungs for field in rung.patch} >= {"plan.micro_batch", "plan.sharding", "plan.offload"}
    largest = max(plan_bytes(rung.prediction) for rung in rungs)
    unchanged = cheapest_first(plan, question, needed_bytes=1e6 * total, device_bytes=total)
    assert unchanged == []
    assert largest > 0


def test_a_patch_changes_only_the_fields_that_it_names() -> None:
    plan = plan_of(mesh={"dp_replicate": 4}, micro_batch=2)
    changed = plan_with(plan, {"plan.mesh.dp_shard": 4, "plan.mesh.dp_replicate": 1, "train.steps": 9})
    assert (changed.mesh.dp_shard, changed.mesh.dp_replicate, changed.micro_batch) == (4, 1, 2)


def test_rungs_that_save_too_little_or_need_more_memory_are_skipped() -> None:
    plan = plan_of(precision="fp16", compile=True, loss="fused", micro_batch=8)
    rung = next_rung(plan, question_for("llama-3.2-1b", "1xH200", batch=8, seq_len=1024))
    assert rung is not None
    assert rung[1] == "micro-batch 8 -> 2, accumulation 1 -> 4"
    # Accumulation keeps the gradients between micro-batches, which here costs more than half a micro-batch saves.
    rung = next_rung(plan.model_copy(update={"micro_batch": 2}),
                     question_for("llama-3.2-1b", "1xH200", batch=2, seq_len=2048))  # fmt: skip
    assert rung is not None
    assert rung[1] == "recompute none -> elementwise"

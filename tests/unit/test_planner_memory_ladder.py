"""The memory ladder: which plan change follows an OOM, and which one is the cheapest."""

from dataclasses import replace
from typing import Any

from trimaran.core import Mesh, Plan, Recipe
from trimaran.cost import predict
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import (
    Question,
    all_changes,
    cheapest_first,
    describe_change,
    may_expand_segments,
    next_rung,
    plan_bytes,
    plan_with,
)


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


def test_the_launcher_takes_the_doctors_first_rung() -> None:
    """One ladder: what the doctor recommends is what the launcher does, with the same global batch."""
    for preset, cluster, batch, seq_len, fields in (
        ("llama-3.2-1b", "1xH200", 16, 4096, {"micro_batch": 16}),
        ("llama-3.2-1b", "1xH200", 1, 32_768, {"micro_batch": 1}),
        ("llama-3.1-8b", "8xH100", 64, 8192, {"mesh": {"dp_replicate": 8}, "micro_batch": 8}),
        ("llama-3.1-8b", "8xH100", 8, 65_536, {"mesh": {"dp_shard": 8}, "sharding": "parameters", "loss": "fused"}),
    ):
        question = question_for(preset, cluster, batch=batch, seq_len=seq_len)
        plan, total = plan_of(**fields), float(question.cluster.device.memory_bytes)
        needed = max(total, plan_bytes(predict(question.job, question.cluster, plan)))
        cheapest = cheapest_first(plan, question, needed_bytes=needed, device_bytes=total)[0]
        rung = next_rung(plan, question)
        assert rung is not None
        assert rung[0] == cheapest.plan.model_copy(update={"prediction": None})
        assert rung[0].global_batch == batch
        assert rung[0].prediction is None
        assert rung[1] == describe_change(plan, cheapest.plan)


def test_the_cheapest_fitting_rung_is_taken_and_not_the_next_in_a_fixed_order() -> None:
    question = question_for("llama-3.2-1b", "1xH200", batch=16, seq_len=4096)
    plan = plan_of(micro_batch=16)
    rung = next_rung(plan, question)
    assert rung is not None
    assert rung[1] == "loss logits -> chunked", "full logits of 128k tokens are the cheapest to do without"
    fused = next_rung(plan_of(micro_batch=16, loss="fused"), question)
    assert fused is not None
    assert "micro-batch" in fused[1], "a half micro-batch costs less than recompute"


def test_every_rung_keeps_the_global_batch_and_what_changes_results() -> None:
    """The rungs are of every kind: micro-batch, recompute, loss, offload, sharding and context parallelism."""
    plan = plan_of(mesh={"dp_replicate": 2, "dp_shard": 4}, sharding="optimizer", micro_batch=4, grad_accum=2)
    fields = set()
    for patch in all_changes(plan):
        changed = plan_with(plan, patch)
        assert changed.global_batch == plan.global_batch
        assert changed.mesh.world_size == plan.mesh.world_size
        assert (changed.precision, changed.engine) == (plan.precision, plan.engine)
        assert changed.comm == plan.comm
        fields |= patch.keys()
    assert fields == {
        "plan.micro_batch", "plan.grad_accum", "plan.recompute", "plan.loss", "plan.offload", "plan.sharding",
        "plan.mesh.dp_replicate", "plan.mesh.dp_shard", "plan.mesh.cp",
    }  # fmt: skip
    stages = {patch["plan.sharding"] for patch in all_changes(plan) if "plan.sharding" in patch}
    assert stages == {"gradients", "parameters"}, "only deeper ones"


def test_context_parallelism_is_the_rung_for_one_long_sequence() -> None:
    question = question_for("llama-3.1-8b", "8xH100", batch=8, seq_len=131_072)
    plan = plan_of(mesh={"dp_shard": 8}, sharding="parameters", loss="chunked", recompute="full", micro_batch=1)
    total = float(question.cluster.device.memory_bytes)
    rungs = cheapest_first(plan, question, needed_bytes=1.2 * total, device_bytes=total)
    assert any(rung.plan.mesh.cp > 1 and rung.plan.global_batch == 8 for rung in rungs)
    without = next_rung(plan, question, may_offload=False)
    assert without is not None
    assert without[0].mesh.cp > 1
    assert without[1].startswith("data ranks 8 -> 4, cp 1 -> 2, accumulation 1 -> 2")


def test_pins_of_mesh_sharding_and_offload_stay() -> None:
    pins = {"mesh": {"dp_replicate": 8, "cp": 1}, "sharding": "none", "offload": "none", "loss": "logits",
            "micro_batch": 8, "precision": "bf16"}  # fmt: skip
    question = question_for("llama-3.2-1b", "8xH100", batch=64, seq_len=4096)
    recipe = question.recipe.model_copy(update={"plan": Plan.model_validate(pins)})
    rung = next_rung(plan_of(**pins), replace(question, recipe=recipe))
    assert rung is not None
    changed = rung[0]
    assert (changed.mesh, changed.sharding, changed.offload, changed.loss) == (
        Mesh(dp_replicate=8), "none", "none", "logits",
    )  # fmt: skip
    assert (changed.micro_batch, changed.recompute) != (8, "none")


def test_a_host_without_memory_gets_nothing_offloaded_and_a_cpu_never_does() -> None:
    question = question_for("llama-3.1-8b", "1xH200", batch=4, seq_len=512)
    plan = plan_of(micro_batch=4, compile=True, loss="fused")
    rung = next_rung(plan, question)
    assert rung is not None
    assert rung[1] == "offload none -> optimizer", "weights and moments are most of the memory"
    without = next_rung(plan, question, may_offload=False)
    assert without is not None
    # No micro-batch saves 8 %: the rule decides as without a prediction.
    assert without == next_rung(plan)
    on_cpu = question_for("tiny", "2xcpu", batch=8, seq_len=64)
    rungs = cheapest_first(Plan.model_validate({"mesh": {"dp_replicate": 2}, "micro_batch": 4}), on_cpu,
                           needed_bytes=1e9, device_bytes=1e9)  # fmt: skip
    assert {rung.plan.offload for rung in rungs} == {"none"}


def test_fragmented_memory_gets_expandable_segments_before_anything_else() -> None:
    steady, sharded = plan_of(mesh={"dp_replicate": 8}), plan_of(mesh={"dp_shard": 8}, sharding="parameters")
    assert may_expand_segments(steady, hole_bytes=3e9, wanted_bytes=1e9)
    assert not may_expand_segments(steady, hole_bytes=0.5e9, wanted_bytes=1e9), "the holes are too small"
    assert not may_expand_segments(steady, hole_bytes=0.0, wanted_bytes=0.0)
    assert not may_expand_segments(sharded, hole_bytes=3e9, wanted_bytes=1e9), "it has them from the start"


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
    # Accumulation keeps the gradients between micro-batches, which here costs more than half a micro-batch saves.
    plan = plan_of(precision="fp16", compile=True, loss="fused", micro_batch=2)
    question = question_for("llama-3.2-1b", "1xH200", batch=2, seq_len=2048)
    total = float(question.cluster.device.memory_bytes)
    rungs = cheapest_first(plan, question, needed_bytes=total, device_bytes=total)
    alone = {"plan.micro_batch": 1, "plan.grad_accum": 2}
    assert alone in list(all_changes(plan))
    assert alone not in [rung.patch for rung in rungs]
    rung = next_rung(plan, question, may_offload=False)
    assert rung is not None
    assert rung[1] == "recompute none -> elementwise"

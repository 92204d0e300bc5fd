"""Neighbours of a plan: one setting differs, training stays the same, and pins stay."""

from typing import Any

import pytest

from trimaran.core import Comm, Mesh, Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, outline_of
from trimaran.planner import Question, check_plan, keeps_pins, neighbour_patches, neighbours, search


def question_for(preset: str, cluster: str, *, plan: Any = "auto", batch: int = 64, seq_len: int = 2048) -> Question:
    tree = {"data": {"seq_len": seq_len}, "train": {"global_batch": batch}, "plan": plan}
    spec = PRESETS[preset]
    return Question(recipe=Recipe.model_validate(tree), spec=spec, outline=outline_of(spec),
                    cluster=parse_cluster(cluster))  # fmt: skip


KINDS = {"micro-batch", "recompute", "offload", "compile", "CUDA graphs", "sharding", "loss", "overlap", "bucket size",
         "prefetch", "schedule", "context", "regather"}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("auto", {"micro-batch", "recompute", "compile", "sharding", "loss"}),
        ({"mesh": {"pp": 2}}, {"schedule", "micro-batch", "recompute"}),
        ({"mesh": {"tp": 2}}, {"regather"}),
        ({"mesh": {"cp": 2}}, {"context"}),
        ({"sharding": "parameters", "mesh": {"dp_shard": 8}}, {"prefetch", "bucket size"}),
        ({"mesh": {"dp_replicate": 8}, "recompute": "full"}, {"overlap", "bucket size"}),
    ],
)
def test_neighbours_are_legal_predicted_and_train_the_same(plan: Any, kinds: set[str]) -> None:
    question = question_for("llama-3.2-1b", "8xH100", plan=plan)
    best = search(question).ranked[0]
    found = neighbours(best, question)
    assert kinds <= {each.kind for each in found} <= KINDS
    for each in found:
        check_plan(each.plan, question.recipe, question.spec, question.cluster, question.outline)
        assert each.plan != best
        assert each.plan.prediction is not None
        assert each.plan.global_batch == best.global_batch
        assert (each.plan.precision, each.plan.engine) == (best.precision, best.engine)
        assert (each.plan.comm.compression, each.plan.comm.local_steps) == ("none", 1)
        assert keeps_pins(each.plan, question.pins)


def test_pinned_fields_stay_in_sections_too() -> None:
    pins = {"micro_batch": 2, "recompute": "selective", "comm": {"bucket_mb": 50}, "mesh": {"dp_shard": 8}}
    question = question_for("llama-3.2-1b", "8xH100", plan=pins)
    best = search(question).ranked[0]
    found = neighbours(best, question)
    assert found
    assert {each.kind for each in found}.isdisjoint({"micro-batch", "recompute", "bucket size"})
    assert {each.plan.mesh.dp_shard for each in found} == {8}
    assert {each.plan.sharding for each in found if each.kind == "sharding"} <= {"optimizer", "gradients", "parameters"}


def test_pins_are_compared_by_value() -> None:
    pins = Plan.model_validate({"mesh": {"tp": 2}, "compile": False})
    assert keeps_pins(Plan.model_validate({"mesh": {"tp": 2, "dp_replicate": 4}}), pins)
    assert not keeps_pins(Plan.model_validate({"mesh": {"tp": 4}}), pins)
    assert not keeps_pins(Plan.model_validate({"mesh": {"tp": 2}, "compile": True}), pins)


def test_micro_batches_are_the_next_divisors() -> None:
    question = question_for("tiny", "2xcpu", batch=24, seq_len=64)
    plan = Plan.model_validate({"mesh": {"dp_replicate": 2}, "micro_batch": 4, "grad_accum": 3})
    sizes = [(each.plan.micro_batch, each.plan.grad_accum) for each in neighbours(plan, question)
             if each.kind == "micro-batch"]  # fmt: skip
    assert sizes == [(3, 4), (6, 2)]


def test_far_neighbours_have_all_larger_sizes() -> None:
    question = question_for("tiny", "2xcpu", batch=32, seq_len=64)
    plan = Plan(mesh=Mesh(dp_replicate=2), micro_batch=2, grad_accum=8, comm=Comm(bucket_mb=1))
    found = list(neighbour_patches(plan, question, far=True))
    sizes = [patch["plan.micro_batch"] for kind, patch in found if kind == "micro-batch"]
    assert sorted(sizes) == [1, 4, 8, 16]
    buckets = [patch["plan.comm.bucket_mb"] for kind, patch in found if kind == "bucket size"]
    assert buckets == [2, 5], "5 MiB hold all 3.2 MiB of gradients, and so would more"


def test_another_schedule_with_as_many_stages_keeps_their_cut() -> None:
    question = question_for("tiny", "2xcpu", batch=32, seq_len=64, plan={"mesh": {"pp": 2}})
    pipeline = {"schedule": "gpipe", "stages": [1, 3]}
    plan = Plan.model_validate({"mesh": {"pp": 2}, "micro_batch": 2, "grad_accum": 16, "pipeline": pipeline})
    found = {each.plan.pipeline.schedule: each.plan.pipeline.stages for each in neighbours(plan, question)
             if each.kind == "schedule"}  # fmt: skip
    assert found["1f1b"] == (1, 3)
    assert len(found["zero-bubble"]) == 4


def test_buckets_that_hold_all_gradients_are_alike() -> None:
    question = question_for("tiny", "2xcpu", batch=8, seq_len=64)
    plan = Plan.model_validate({"mesh": {"dp_replicate": 2}, "micro_batch": 4})
    sizes = [each.plan.comm.bucket_mb for each in neighbours(plan, question) if each.kind == "bucket size"]
    assert sizes == [2]  # of 3.2 MiB of gradients; the default of 25 MiB holds all of them, as 50 would

"""The planner lets replicas sum gradients after backward if CUDA graphs then gain more than overlap does."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from trimaran.app import Request, show_plan
from trimaran.core import Plan, Recipe, UserError
from trimaran.cost import LATE_BUCKET_BYTES, all_reduce_seconds, predict, ring_of
from trimaran.launch import resized
from trimaran.machine import Cluster, parse_cluster
from trimaran.models import PRESETS, Block, ExpertSpec, ModelSpec, outline_of, spec_of
from trimaran.parallel import BUCKET_BYTES
from trimaran.planner import Question, all_changes, check_plan, plan_with, search

SMALL = {"layers": 8, "hidden": 384, "heads": 6, "kv_heads": 6, "head_dim": 64, "ffn": 1024, "vocab": 32_000}
LARGE = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192, "vocab": 128_256}


def question(
    shape: dict[str, int] = SMALL,
    cluster: Cluster | str = "8xH100",
    *,
    seq_len: int = 512,
    batch: int = 64,
    **more: Any,
) -> Question:
    tree = {"model": {"shape": shape}, "train": {"global_batch": batch}, **more}
    recipe = Recipe.model_validate(tree | {"data": {"seq_len": seq_len} | more.get("data", {})})
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    spec = spec_of(recipe.model)
    assert isinstance(spec, ModelSpec)
    return Question(recipe=recipe, spec=spec, outline=outline_of(spec), cluster=found, max_plans=4)


def best(asked: Question) -> Plan:
    return search(asked).ranked[0]


def slow_cluster(times: float) -> Cluster:
    cluster = parse_cluster("8xH100")
    return replace(cluster, links=tuple(replace(each, bandwidth=each.bandwidth / times) for each in cluster.levels))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_small_model_on_fast_links_is_captured(compiled: bool) -> None:
    answer = search(question(plan={"compile": compiled}))
    plan = answer.ranked[0]
    assert (plan.mesh.dp_replicate, plan.comm.overlap, plan.captures_steps) == (8, False, True)
    during = best(question(plan={"compile": compiled, "comm": {"overlap": True}}))
    assert plan.prediction is not None
    assert during.prediction is not None
    assert during.prediction.step_seconds > 2 * plan.prediction.step_seconds
    lost = [miss.why for miss in answer.misses if miss.plan.mesh == plan.mesh and miss.plan.comm.overlap]
    assert len(lost) == 1
    assert "summed during backward" in lost[0]


@pytest.mark.parametrize(
    "asked",
    [
        question(LARGE, seq_len=2048, batch=128),  # the device works longer than the host
        question(cluster=slow_cluster(500)),  # the sum would take longer than the kernel launches
        question(plan={"cuda_graphs": False}),
        question(plan={"precision": "fp16"}),
        question(plan={"comm": {"compression": "bf16"}}),
        question(data={"isolate_documents": True}),
        question(cluster="8xcpu"),
    ],
)
def test_gradients_are_summed_during_backward_elsewhere(asked: Question) -> None:
    assert best(asked).comm.overlap


def test_a_pinned_overlap_stays() -> None:
    for overlap, shape in ((True, SMALL), (False, LARGE)):  # each as it would not be chosen
        asked = question(shape, plan={"comm": {"overlap": overlap}})
        assert all(plan.comm.overlap == overlap for plan in search(asked).ranked)


def test_the_other_settings_of_comm_do_not_pin_the_overlap() -> None:
    plan = best(question(plan={"comm": {"bucket_mb": 50}}))
    assert (plan.comm.bucket_mb, plan.comm.overlap) == (50, False)


def test_all_of_the_reduction_is_exposed_in_a_few_large_messages() -> None:
    asked = question(LARGE, seq_len=2048, batch=128)
    plan = Plan.model_validate({
        "mesh": {"dp_replicate": 8}, "micro_batch": 4, "grad_accum": 4, "precision": "bf16", "compile": True,
        "loss": "fused", "comm": {"overlap": False},
    })  # fmt: skip
    assert asked.outline is not None
    num_bytes = 4 * asked.outline.trained_parameters
    assert LATE_BUCKET_BYTES == BUCKET_BYTES, "the trainer's"
    count = -(-num_bytes // LATE_BUCKET_BYTES)
    expected = count * all_reduce_seconds(num_bytes / count, ring_of(asked.cluster.levels, 8, 1))
    found = predict(asked.job, asked.cluster, plan)
    assert found.exposed == {"gradients on NVLink": pytest.approx(expected, rel=1e-3)}
    overlapping = predict(asked.job, asked.cluster, plan.model_copy(update={"comm": Plan().comm}))
    assert found.time["comm"] > overlapping.time["comm"]


def test_experts_that_are_spread_are_not_summed_over_all_replicas() -> None:
    recipe = Recipe.model_validate({"train": {"global_batch": 8}})
    block = Block(experts=ExpertSpec(num_experts=4, top_k=2, ffn=256))
    spec = replace(PRESETS["tiny"], block=block)
    plan = Plan.model_validate({"mesh": {"dp_replicate": 4, "ep": 2}, "micro_batch": 2, "comm": {"overlap": False}})
    assert not plan.reduces_after_backward
    with pytest.raises(UserError, match="P003"):
        check_plan(plan, recipe, spec, parse_cluster("4xcpu"))


def test_a_plan_with_shards_overlaps_again() -> None:
    plan = best(question())
    assert plan.reduces_after_backward
    sharded = [plan_with(plan, patch) for patch in all_changes(plan) if "plan.sharding" in patch]
    assert sharded
    assert all(each.comm.overlap for each in sharded)


def test_another_number_of_ranks_may_overlap_unless_it_is_pinned() -> None:
    recipe = question(cluster="8xH100").recipe.model_copy(update={"cluster": "8xH100"})
    large = question(LARGE, seq_len=2048, batch=128).recipe.model_copy(update={"cluster": "8xH100"})
    plan = best(question())
    smaller, larger = resized(plan, recipe, 4), resized(plan, large, 8)
    assert smaller is not None
    assert larger is not None
    assert (smaller.comm.overlap, larger.comm.overlap) == (False, True)
    pinned = large.model_copy(update={"plan": Plan.model_validate({"comm": {"overlap": False}})})
    kept = resized(plan, pinned, 8)
    assert kept is not None
    assert not kept.comm.overlap


def test_the_view_says_when_gradients_are_summed() -> None:
    asked, text = question(), io.StringIO()
    plan = best(asked)
    request = Request(recipe=asked.recipe, spec=asked.spec, cluster=asked.cluster, outline=asked.outline, plan=plan)
    show_plan(request, Console(file=text, width=200))
    assert "gradients summed after backward" in text.getvalue()
    assert "so that CUDA graphs launch forward and backward" in text.getvalue()

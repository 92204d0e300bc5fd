"""The changes that could help a run: patches of findings, and neighbours of its plan by the cost model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.unit.test_doctor_speed import predicted_run, recorded
from tests.unit.test_planner_neighbours import question_for
from trimaran.autopilot import Proposal, best_layout, changes_course, describe, is_changeable, proposals_of
from trimaran.core import Comm, Mesh, Pipeline, Plan
from trimaran.doctor import Evidence, diagnose
from trimaran.planner import neighbour_patches, plan_with

SLOW_1B = ("model.preset=llama-3.2-1b", "cluster=1xH100", "data.seq_len=2048", "train.global_batch=8",
           "plan={recompute: full, micro_batch: 1}")  # fmt: skip


def proposals(evidence: Evidence, **options: Any) -> dict[str, Proposal]:
    found = proposals_of(evidence, diagnose(evidence), **options)
    for each in found:
        assert each.patch.keys() == each.undo.keys()
        assert all(map(is_changeable, each.patch))
        assert not changes_course(each.patch) or evidence.recipe.autopilot.may_change_course
        assert each.uncertainty > 0
        again = plan_with(plan_with(evidence.plan, each.patch), each.undo)
        assert again.model_dump() == evidence.plan.model_dump()
    texts = [f"{describe(each.patch, each.undo)}{' to save memory' * each.saves_memory}" for each in found]
    assert len(set(texts)) == len(texts), "each change is proposed once"
    return dict(zip(texts, found, strict=True))


def test_a_bad_start_on_a_gpu_gets_less_recompute_and_a_larger_micro_batch() -> None:
    found = proposals(predicted_run(*SLOW_1B))
    less, larger = found["recompute full -> none"], found["micro_batch 1 -> 2, grad_accum 8 -> 4"]
    assert less.gain > 0.1
    assert less.peak_ratio > 1
    assert larger.gain > 0
    assert "by the cost model" in less.reason


def test_a_change_that_cannot_fit_is_not_proposed() -> None:
    long = [each.replace("2048", "65536") for each in SLOW_1B]
    assert "recompute full -> none" not in proposals(predicted_run(*long))


def test_findings_come_with_their_code_and_verdict() -> None:
    found = proposals(recorded("slow-loader"))
    loader = next(each for each in found.values() if "data.workers" in each.patch)
    assert loader.finding == "F001"
    assert "waits" in loader.reason
    assert loader.is_in_place


def test_fragmented_memory_gets_expandable_segments_in_place() -> None:
    memory = {"reserved": 71 << 30, "fragmentation": 0.34, "total": 79 << 30}
    run = predicted_run(*SLOW_1B[:-1], "plan={micro_batch: 4}")
    steps = tuple(each | {"memory": memory | {"retries": each["step"] // 4}} for each in run.steps)
    found = proposals(replace(run, steps=steps))
    allocator = found["faults.expandable_segments auto -> True"]
    assert allocator.finding == "F060"
    assert allocator.is_in_place
    assert not allocator.saves_memory, "it is kept if steps are shorter"
    assert allocator.gain > 0


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        slow(("checkpoint.asynchronous=false", "checkpoint.asynchronous False -> True")),
        ("checkpoint.every=10", "checkpoint.every 10 -> auto"),
        slow(("checkpoint.memory=1", "checkpoint.memory 1 -> auto")),
    ],
)
def test_checkpoints_that_stall_get_another_interval_or_are_asynchronous(recipe: str, wanted: str) -> None:
    found = proposals(predicted_run(*SLOW_1B, recipe, stall=20.0))
    assert found[wanted].finding == "F007"
    assert found[wanted].is_in_place
    assert found[wanted].gain > 0.05


def test_needless_offload_and_needless_compilation_can_be_taken_back() -> None:
    found = proposals(predicted_run(*SLOW_1B[:-1], "plan={micro_batch: 4, offload: optimizer, compile: true}"))
    assert found["offload optimizer -> none"].gain > 0
    assert found["offload optimizer -> none"].peak_ratio > 1
    assert "offload optimizer -> parameters" not in found
    assert "compile True -> False" in found


def test_fewer_bits_are_proposed_only_if_the_recipe_allows_other_results() -> None:
    settings = ("model.preset=llama-3.2-1b", "cluster=8xH100", "data.seq_len=2048", "train.global_batch=64",
                "plan={mesh: {dp_replicate: 8}, precision: fp32, micro_batch: 1}")  # fmt: skip
    assert "precision fp32 -> bf16" not in proposals(predicted_run(*settings))
    found = proposals(predicted_run(*settings, "autopilot.may_change_course=true"))
    assert found["precision fp32 -> bf16"].gain > 0.2
    assert "comm.compression none -> bf16" in found


def test_no_loader_processes_are_added_to_a_host_without_memory() -> None:
    slow = recorded("slow-loader")
    assert any("data.workers" in each.patch for each in proposals(slow).values())
    full = {"time": 1.0, "ram": 64 << 30, "ram_used": 60 << 30}
    assert not any("data.workers" in each.patch for each in proposals(replace(slow, samples=(full,))).values())


def test_the_cut_of_a_pipeline_follows_from_measured_stages() -> None:
    found = proposals(recorded("uneven-stages"))
    assert any("plan.pipeline.stages" in each.patch and each.finding == "F011" for each in found.values())


def test_the_whole_layout_is_searched_if_asked_for() -> None:
    settings = ("model.preset=llama-3.2-1b", "cluster=8xH100", "data.seq_len=2048", "train.global_batch=64",
                "plan={mesh: {tp: 8}}")  # fmt: skip
    evidence = predicted_run(*settings)
    assert not any("plan.mesh.tp" in each.patch for each in proposals(evidence).values())
    layout = next(
        each for each in proposals(evidence, layout=best_layout(evidence)).values() if "plan.mesh.tp" in each.patch
    )
    assert layout.patch["plan.mesh.tp"] < 8
    assert layout.gain > 0.05
    assert not layout.is_in_place


def test_changes_that_save_memory_are_proposed_only_when_it_is_short() -> None:
    settings = (*SLOW_1B[:-1], "plan={micro_batch: 4}")
    assert not any(each.saves_memory for each in proposals(predicted_run(*settings)).values())
    saving = [each for each in proposals(predicted_run(*settings), peak_is_near=True).values() if each.saves_memory]
    assert saving
    assert all(each.peak_ratio < 1 for each in saving)


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (Plan(micro_batch=4), {"plan.micro_batch": 2, "plan.grad_accum": 2}),
        (Plan(recompute=2), {"plan.recompute": 4}),
        (Plan(recompute="selective"), {"plan.recompute": "elementwise"}),
        (Plan(offload="optimizer"), {"plan.offload": "none"}),
        (Plan(mesh=Mesh(dp_shard=2), sharding="parameters"), {"plan.sharding": "optimizer"}),
        (
            Plan(mesh=Mesh(dp_shard=2), sharding="parameters"),
            {"plan.sharding": "none", "plan.mesh.dp_replicate": 2, "plan.mesh.dp_shard": 1},
        ),
        (Plan(mesh=Mesh(dp_shard=2), sharding="parameters"), {"plan.comm.prefetch": 2}),
        (Plan(mesh=Mesh(dp_replicate=2), comm=Comm(bucket_mb=1)), {"plan.comm.bucket_mb": 25}),
        (Plan(mesh=Mesh(pp=2), pipeline=Pipeline(schedule="gpipe")), {"plan.pipeline.schedule": "1f1b"}),
        (Plan(), {"plan.compile": True}),
    ],
)
def test_the_neighbours_of_a_plan_change_one_thing(plan: Plan, wanted: dict[str, Any]) -> None:
    kind = "cpu" if plan.mesh.world_size == 1 and plan.offload == "none" else "H100"
    question = question_for("llama-3.2-1b", f"{plan.mesh.world_size}x{kind}")
    assert wanted in [patch for _, patch in neighbour_patches(plan, question, far=True)]


def test_without_a_prediction_only_findings_propose_changes(tmp_path: Path) -> None:
    evidence = Evidence(recipe=recorded("healthy").recipe, plan=Plan(), steps=recorded("healthy").steps)
    assert proposals_of(evidence, []) == []
    assert proposals_of(Evidence(recipe=evidence.recipe, plan=Plan()), []) == []

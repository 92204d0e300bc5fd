"""Every rung of the memory ladder trains the same trajectory as the plan that ran out of memory, in real ranks."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity import Trajectory, assert_same_trajectory, train_trajectory
from trimaran.core import Plan, Recipe, UserError
from trimaran.machine import parse_cluster
from trimaran.models import ModelSpec, outline_of, spec_of
from trimaran.planner import Patch, Question, all_changes, check_plan, describe_change, plan_with

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
PLAN = Plan.model_validate({"mesh": {"dp_replicate": 2}, "micro_batch": 4})
# The rungs that the launcher took before, and context parallelism with a smaller micro-batch; the rest is slow.
QUICK = {
    "data ranks 2 -> 1, cp 1 -> 2, micro-batch 4 -> 2, accumulation 1 -> 4",
    "sharding none -> optimizer, micro-batch 4 -> 1, accumulation 1 -> 4, recompute none -> full",
}


@lru_cache
def recipe() -> Recipe:
    tree: dict[str, Any] = {
        "model": {"preset": "tiny", "shape": SHAPE},
        "data": {"seq_len": 256},
        "train": {"steps": 3, "global_batch": 8, "sample": {"tokens": 0}, "evaluate": {"batches": 0}},
        "checkpoint": {"every": "off", "memory": 0},
        "cluster": "2xcpu",
    }
    return Recipe.model_validate(tree)


def rungs() -> Iterator[Any]:
    """Yield the legal rungs on a CPU: one change of each kind, and combinations of a few."""
    spec = spec_of(recipe().model)
    assert isinstance(spec, ModelSpec)
    question = Question(recipe=recipe(), spec=spec, outline=outline_of(spec), cluster=parse_cluster("2xcpu"))
    for patch in all_changes(PLAN):
        name = describe_change(PLAN, plan_with(PLAN, patch))
        if "plan.offload" in patch or not _is_legal(patch, question):
            continue
        is_single = len({field for field in patch if field != "plan.grad_accum"} - {"plan.mesh.dp_replicate"}) == 1
        if (
            name in QUICK
            or is_single
            or set(patch) == {"plan.mesh.dp_replicate", "plan.mesh.dp_shard", "plan.sharding"}
        ):
            yield pytest.param(patch, id=name, marks=() if name in QUICK else pytest.mark.slow)


def _is_legal(patch: Patch, question: Question) -> bool:
    try:
        check_plan(plan_with(PLAN, patch), question.recipe, question.spec, question.cluster, question.outline)
    except UserError:
        return False
    return True


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder") / "runs"
    folder.mkdir()
    return folder


@lru_cache
def reference(workspace: Path) -> Trajectory:
    return train_trajectory(recipe(), PLAN, workspace)


@pytest.mark.parametrize("patch", list(rungs()))
def test_a_rung_trains_the_same(patch: Patch, workspace: Path) -> None:
    changed = plan_with(PLAN, patch)
    assert changed.global_batch == PLAN.global_batch
    assert_same_trajectory(train_trajectory(recipe(), changed, workspace), reference(workspace))


def test_every_quick_rung_exists() -> None:
    assert {describe_change(PLAN, plan_with(PLAN, patch)) for patch in all_changes(PLAN)} >= QUICK

"""Asynchronous training in plans: what can run, what is refused, and that nobody gets it without asking."""

from typing import Any

import pytest

from trimaran.core import Mesh, Plan, Recipe, UserError, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import check_plan, choose

ASYNC = {"engine": "async", "mesh": {"dp_replicate": 8}, "micro_batch": 4, "precision": "bf16"}


def chosen(cluster: str, *settings: str) -> Plan:
    recipe = parse_recipe("", name="test", overrides=[f"cluster={cluster}", *settings])
    return choose(recipe, spec_of(recipe.model), parse_cluster(cluster))


def check(plan: dict[str, Any], **sections: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(sections)
    check_plan(Plan.model_validate(ASYNC | plan), recipe, spec_of(recipe.model), parse_cluster("8xH100"))


@pytest.mark.parametrize(("cluster", "ranks"), [("2xcpu", 2), ("8xH100", 8), ("2x8xV100-32GB", 16)])
def test_a_pinned_engine_gets_whole_replicas(cluster: str, ranks: int) -> None:
    plan = chosen(cluster, "plan.engine=async")
    assert (plan.engine, plan.mesh, plan.sharding, plan.offload) == ("async", Mesh(dp_replicate=ranks), "none", "none")
    assert plan.precision in ("fp32", "bf16")
    assert "async, staleness 4" in str(plan)


@pytest.mark.parametrize("cluster", ["2xcpu", "8xH100"])
def test_the_planner_never_chooses_it(cluster: str) -> None:
    assert chosen(cluster).engine == "torch"


def test_replicas_in_bf16_are_legal_with_any_staleness() -> None:
    check({})
    check({"comm": {"async_sgd": {"staleness": 0, "pause_every": 1}}, "recompute": "full", "grad_accum": 2,
           "micro_batch": 2})  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "sections", "where", "fix"),
    [
        ({"mesh": {"dp_shard": 8}, "sharding": "parameters"}, {}, "plan.mesh", "dp_replicate"),
        ({"mesh": {"dp_replicate": 4, "tp": 2}, "micro_batch": 8}, {}, "plan.mesh", "dp_replicate"),
        ({"precision": "fp16"}, {}, "plan.precision", "bf16"),
        ({"offload": "optimizer"}, {}, "plan.offload", "leave out"),
        ({"comm": {"compression": "int8"}}, {}, "plan.comm.compression", "leave out"),
        ({"comm": {"local_steps": 4}}, {}, "plan.comm.local_steps", "leave out"),
        ({"comm": {"overlap": False}}, {}, "plan.comm.overlap", "leave out"),
        ({}, {"train": {"optimizer": {"states": "8bit"}}}, "train.optimizer.states", "fp32"),
        ({}, {"model": {"preset": "tiny", "adapter": {"rank": 4}}}, "model.adapter", "leave out"),
        ({}, {"faults": {"not_finite": "rewind"}}, "faults.not_finite", "skip"),
        ({}, {"telemetry": {"profile": "3:5"}}, "telemetry.profile", "leave out"),
        ({"engine": "torch", "comm": {"async_sgd": {"staleness": 2}}}, {}, "plan.comm.async_sgd", "plan.engine"),
    ],
)
def test_what_it_cannot_run_is_refused(plan: dict[str, Any], sections: Any, where: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        check(plan, **sections)
    assert (caught.value.code, caught.value.where) == ("P095", where)
    assert fix in caught.value.fix

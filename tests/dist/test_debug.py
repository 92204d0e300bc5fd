"""`faults.debug` changes no result, and what it switches on is on."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parity import plan_for, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.doctor import Evidence, debug_on
from trimaran.runs import DEBUG_VARIABLES, worker_environment
from trimaran.train import join_process_group, read_rank_info

SHAPE = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocab": 260}


def recipe_of(*, debug: bool) -> Recipe:
    train = {"steps": 3, "global_batch": 8, "sample": {"tokens": 0}, "evaluate": {"batches": 0}}
    tree = {"model": {"preset": "tiny", "shape": SHAPE}, "data": {"seq_len": 32}, "train": train}
    return Recipe.model_validate(tree | {"faults": {"debug": debug}})


def test_losses_and_weights_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    plan = plan_for(recipe_of(debug=False), grad_accum=1, dp_shard=2)
    usual = train_trajectory(recipe_of(debug=False), plan, folder)
    for name, value in DEBUG_VARIABLES.items():
        monkeypatch.setenv(name, value)
    checked = train_trajectory(recipe_of(debug=True), plan, folder)
    assert (checked.losses, checked.norms) == (usual.losses, usual.norms)
    assert all(torch.equal(checked.weights[name], each) for name, each in usual.weights.items())


def reduce_another_shape() -> str:
    join_process_group(read_rank_info(os.environ))
    try:
        dist.all_reduce(torch.zeros(3 + dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_collective_that_differs_between_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", DEBUG_VARIABLES["TORCH_DISTRIBUTED_DEBUG"])
    assert all("mismatch between collectives" in each for each in run_ranks(2, reduce_another_shape))


def test_ranks_get_the_variables_unless_the_user_has_set_them() -> None:
    outer = {"NCCL_DEBUG": "TRACE"}
    found = worker_environment(outer, Plan(), on_cpu=True, deterministic=False, debug=True)
    assert found["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "NCCL_DEBUG" not in found
    assert not DEBUG_VARIABLES.keys() & worker_environment({}, Plan(), on_cpu=True, deterministic=False).keys()


def test_the_doctor_notes_it() -> None:
    for debug in (True, False):
        found = debug_on(Evidence(recipe=recipe_of(debug=debug), plan=Plan(), steps=({"step": 1},)))
        assert [each.code for each in found] == ["F078"] * debug

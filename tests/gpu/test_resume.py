"""A state on a GPU, or offloaded to the host, is saved and loaded bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity import plan_for
from tests.resume import SEGMENT_STEPS, recipe_for, train_segment_here
from trimaran.core import Mesh
from trimaran.parallel import build_mesh
from trimaran.train import join_process_group, read_rank_info

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({}, "fp32"),
        ({"precision": "bf16", "offload": "optimizer"}, "fp32"),
        ({"offload": "optimizer"}, "8bit"),
        ({"precision": "bf16"}, "bf16"),
        ({"sharding": "parameters", "offload": "parameters", "precision": "bf16"}, "fp32"),
    ],
    ids=["fused", "host", "host-8bit", "bf16", "parameters-on-host"],
)
def test_a_resume_is_exact(fields: dict[str, Any], states: str) -> None:
    recipe = recipe_for(shape={"hidden": 128, "head_dim": 32, "ffn": 384}, optimizer={"states": states})
    plan = plan_for(recipe, grad_accum=2, **fields)
    full = train_segment_here(recipe, plan, steps=2 * SEGMENT_STEPS)
    again = train_segment_here(recipe, plan, steps=SEGMENT_STEPS, after=full.midway)
    again.assert_loaded(full.midway)
    again.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


def test_random_numbers_on_the_gpu_depend_on_the_step_only() -> None:
    if not dist.is_initialized():
        join_process_group(read_rank_info({}))
    ranks, drawn = build_mesh(Mesh(), device_type="cuda"), []
    for step in (7, 8, 7):
        ranks.reseed(3, step)
        drawn.append(torch.rand(8, device="cuda"))
        torch.rand(100, device="cuda")
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])

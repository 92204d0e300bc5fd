"""Compressed gradients are equal on all ranks, and error feedback corrects the loss."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.nets import Network
from trimaran.parallel import apply_plan, build_mesh
from trimaran.parallel.comm.compression import COMPRESSION
from trimaran.parallel.comm.local_steps import weight_averaging
from trimaran.train.process.rank_info import join_process_group, read_rank_info

STEPS = 150


def gradients(compression: str) -> list[np.ndarray]:
    """Return the reduced gradient of each step; every rank contributes a constant gradient."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    model = nn.Linear(64, 32, bias=False)
    plan = Plan.model_validate({"mesh": Mesh(dp_replicate=2), "comm": {"compression": compression}})
    apply_plan(Network(model, (), None), plan, build_mesh(plan.mesh, device_type="cpu"))
    target = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank_info.rank))
    seen = []
    for _ in range(STEPS):
        model.zero_grad()
        (model(torch.eye(64)) * target.T).sum().backward()
        assert model.weight.grad is not None
        seen.append(model.weight.grad.clone().numpy())
    return seen


def mean_gradient() -> np.ndarray:
    each = [torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    return torch.stack(each).mean(0).numpy()


@pytest.mark.parametrize("compression", COMPRESSION)
def test_every_rank_gets_the_same_gradient(compression: str) -> None:
    ours, theirs = run_ranks(2, gradients, compression)
    assert all(np.array_equal(mine, yours) for mine, yours in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_half_precision_only_rounds(compression: str, tolerance: float) -> None:
    seen = run_ranks(2, gradients, compression)[0]
    assert np.allclose(seen[0], mean_gradient(), rtol=tolerance, atol=tolerance)
    assert not np.array_equal(seen[0], mean_gradient())


@pytest.mark.parametrize("compression", ["powersgd", "topk"])
def test_error_feedback_sends_the_rest_in_later_steps(compression: str) -> None:
    seen = run_ranks(2, gradients, compression)[0]
    wanted = mean_gradient()

    def distance(steps: int) -> float:
        return float(np.linalg.norm(np.mean(seen[:steps], axis=0) - wanted) / np.linalg.norm(wanted))

    last = float(np.linalg.norm(seen[-1] - wanted) / np.linalg.norm(wanted))
    assert last > 0.2, "one step alone is far off"
    assert distance(STEPS) < 0.5 * last, "all steps together are not"


def test_top_k_sends_few_values() -> None:
    first = run_ranks(2, gradients, "topk")[0][0]
    assert 0 < np.count_nonzero(first) <= 2 * 0.01 * first.size


def weights_by_step(local_steps: int) -> list[np.ndarray]:
    """Return the weights after each update; replicas have different data."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.fill_(0.5)
    plan = Plan.model_validate({"mesh": Mesh(dp_replicate=2), "comm": {"local_steps": local_steps}})
    ranks = build_mesh(plan.mesh, device_type="cpu")
    apply_plan(Network(model, (), None), plan, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average_weights = weight_averaging(plan, ranks, list(model.parameters()))
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.full((1, 8), 1.0 + rank_info.rank)).square().sum().backward()
        optimizer.step()
        average_weights()
        seen.append(model.weight.detach().clone().numpy())
    return seen


def test_replicas_with_local_steps_diverge_and_are_averaged() -> None:
    ours, theirs = run_ranks(2, weights_by_step, 3)
    together = [bool(np.array_equal(mine, yours)) for mine, yours in zip(ours, theirs, strict=True)]
    assert together == [False, False, True, False, False, True]

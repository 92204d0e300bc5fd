"""Label smoothing is torch's in every form of the loss, and every plan trains with it as one process does."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from tests.cases import quick_or_slow
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Recipe, UserError
from trimaran.parallel import vocab_parallel_token_losses
from trimaran.planner import check_objective
from trimaran.runs import RunDirectory
from trimaran.train import (
    IGNORED,
    head_losses,
    join_process_group,
    read_rank_info,
    row_losses,
    summed_loss,
    token_losses,
)

ROWS, WIDTH, VOCABULARY, SMOOTHING = 24, 16, 53, 0.15  # two ranks hold 27 and 26 columns
# Chunks, and shards and parts of sequences, add the same sums up.
QUICK = ("accumulated, fused", "tp", "pp")
PLANS: dict[str, dict[str, Any]] = {
    "accumulated, fused": {"grad_accum": 4, "loss": "fused"},
    "ddp, chunked": {"grad_accum": 2, "dp_replicate": 2, "loss": "chunked"},
    "fsdp": {"grad_accum": 1, "dp_shard": 2},
    "tp": {"grad_accum": 2, "tp": 2, "loss": "logits"},
    "pp": {"grad_accum": 4, "pp": 2, "loss": "logits"},
    "cp": {"grad_accum": 1, "cp": 2},
}


def random_logits(source_seed: int = 5) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(source_seed)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=source)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=source)
    labels[::5] = IGNORED
    return logits, labels


def expected_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch's smoothed losses and the gradient of their sum, in double precision."""
    wide = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none", label_smoothing=SMOOTHING)
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    return losses.detach(), gradient


def test_all_losses_of_one_process_are_torchs() -> None:
    logits, labels = random_logits()
    losses, gradient = expected_losses(logits, labels)
    torch.testing.assert_close(token_losses(logits, labels, smoothing=SMOOTHING).double(), losses, atol=1e-6, rtol=1e-6)
    total = summed_loss(logits, labels, smoothing=SMOOTHING)
    torch.testing.assert_close(total.double(), losses.sum(), atol=1e-6, rtol=1e-6)
    unchanged = row_losses(logits.clone(), labels, grad_scale=None, smoothing=SMOOTHING)
    torch.testing.assert_close(unchanged.double(), losses, atol=1e-6, rtol=1e-6)
    overwritten = logits.clone()
    rows = row_losses(overwritten, labels, grad_scale=2.0, smoothing=SMOOTHING)
    torch.testing.assert_close(rows.double(), losses, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(overwritten.double(), 2 * gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_the_fused_head_has_torchs_gradients(rows: int) -> None:
    source = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, WIDTH, generator=source).requires_grad_() for size in (ROWS, VOCABULARY))
    labels = random_logits()[1]
    total, _ = head_losses(hidden, weight, labels, rows=rows, smoothing=SMOOTHING)
    total.sum().backward()
    plain, matrix = (each.detach().double().requires_grad_() for each in (hidden, weight))
    expected = F.cross_entropy(plain @ matrix.t(), labels, ignore_index=IGNORED, reduction="sum",
                               label_smoothing=SMOOTHING)  # fmt: skip
    expected.backward()
    torch.testing.assert_close(total.detach().double()[0], expected.detach(), atol=1e-6, rtol=1e-6)
    for found, wanted in ((hidden.grad, plain.grad), (weight.grad, matrix.grad)):
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def vocab_parallel() -> tuple[list[float], list[list[float]]]:
    """Return the losses, and the gradients of this rank's columns."""
    join_process_group(read_rank_info(os.environ))
    logits, labels = random_logits()
    mesh = init_device_mesh("cpu", (2,))
    columns = -(-VOCABULARY // 2)
    rank = mesh.get_local_rank()
    local = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    sharded = DTensor.from_local(local, mesh, [Shard(1)], shape=logits.shape, stride=logits.stride())
    losses = vocab_parallel_token_losses(sharded, labels, ignored=IGNORED, smoothing=SMOOTHING)
    losses.sum().backward()
    assert local.grad is not None
    return losses.tolist(), local.grad.tolist()


def test_a_vocabulary_of_two_ranks_has_torchs_losses_and_gradients() -> None:
    losses, gradient = expected_losses(*random_logits())
    (first, left), (second, right) = run_ranks(2, vocab_parallel)
    assert first == second
    torch.testing.assert_close(torch.tensor(first).double(), losses, atol=1e-6, rtol=1e-6)
    found = torch.cat([torch.tensor(left), torch.tensor(right)], dim=1)
    torch.testing.assert_close(found.double(), gradient, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoothing")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, smoothing: float) -> Recipe:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64}
    tree = {
        "model": {"family": "decoder", "preset": "tiny", "shape": shape},
        "data": {"source": "jsonl", "path": str(workspace / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True,
                 "workers": 0, "holdout": 0.05},
        "train": {"steps": 3, "global_batch": 8, "lr": 3e-3, "schedule": {"warmup_steps": 0},
                  "evaluate": {"batches": 1}, "sample": {"tokens": 0}},
        "objective": {"label_smoothing": smoothing},
        "checkpoint": {"every": "off", "memory": 0},
    }  # fmt: skip
    return Recipe.model_validate(tree)


def held_out(run: RunDirectory) -> float:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return next(event["data"]["loss"] for event in events if event["kind"] == "evaluation")


@lru_cache
def reference(workspace: Path, smoothing: float) -> tuple[Trajectory, float]:
    recipe = recipe_for(workspace, smoothing)
    run = train_run(recipe, plan_for(recipe, grad_accum=1, loss="logits"), workspace / "runs")
    return trajectory_of(run), held_out(run)


@pytest.mark.parametrize("name", quick_or_slow(PLANS, QUICK.__contains__))
def test_every_plan_trains_as_one_process(workspace: Path, name: str) -> None:
    recipe = recipe_for(workspace, SMOOTHING)
    run = train_run(recipe, plan_for(recipe, **PLANS[name]), workspace / "runs")
    expected, loss = reference(workspace, SMOOTHING)
    assert_same_trajectory(trajectory_of(run), expected)
    assert held_out(run) == pytest.approx(loss, rel=1e-5)


def test_smoothing_changes_training_and_not_what_is_measured(workspace: Path) -> None:
    """The first held-out loss after equal weights would be equal; after three steps only the weights differ a little.

    A smoothed loss of weights that predict well is clearly above a plain one: its least value is the entropy of the
    smoothed target.
    """
    smoothed, measured = reference(workspace, SMOOTHING)
    plain, plainly_measured = reference(workspace, 0.0)
    assert all(ours > theirs for ours, theirs in zip(smoothed.losses[1:], plain.losses[1:], strict=True))
    assert abs(measured - plainly_measured) < abs(smoothed.losses[-1] - plain.losses[-1])


def test_a_perception_model_has_no_labels_to_smooth() -> None:
    tree = {"model": {"family": "perception"}, "data": {"source": "scenes"}, "objective": {"label_smoothing": 0.1}}
    recipe = Recipe.model_validate(tree)
    with pytest.raises(UserError, match="K079: a perception model has no labels to smooth"):
        check_objective(plan_for(recipe, grad_accum=1), recipe)
    with pytest.raises(ValueError, match="label_smoothing is of next-token prediction"):
        Recipe.model_validate({"objective": {"name": "perception", "label_smoothing": 0.1}})

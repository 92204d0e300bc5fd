"""Batches that do not divide by the ranks are dealt, and give the gradient of the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks

ROWS = (7, 1, 8, 2, 5)  # on three ranks, some of these leave a rank without rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(16, (ROWS[step], 6), generator=draw) for _ in range(2))
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
    return {"tokens": tokens, "targets": targets}


def train_plain() -> list[tuple[float, float]]:
    model, numbers = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(len(ROWS)):
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers


def train_prepared(sharding: str, reduction: Any, size: int) -> list[tuple[float, float]]:
    """Return losses and norms. `size` is that of micro-batches; 0 takes the rows at once, with `local_rows`."""
    dist.init_process_group("gloo")
    model, numbers = Net(), []
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    for step in range(len(ROWS)):
        batch = batch_of(step)
        for rows in loop.micro_batches(batch, size=size) if size else [loop.local_rows(batch)]:
            targets = rows["targets"].flatten()
            loss = F.cross_entropy(model(rows["tokens"]).flatten(0, 1), targets, reduction=reduction)
            loop.backward(loss, num_tokens=(targets >= 0).sum(), reduction=reduction)
        result = loop.step(clip_norm=1.0)
        numbers.append((float(result.loss), float(result.grad_norm)))
    return numbers


@pytest.mark.parametrize(
    ("ranks", "sharding", "reduction", "size"),
    [
        (3, "none", "mean", 0),
        (3, "parameters", "sum", 2),
        *map(slow, [(2, "gradients", "mean", 3), (3, "optimizer", "sum", 1), (3, "parameters", "mean", 0)]),
    ],
)
def test_odd_batches_train_like_the_plain_loop(ranks: int, sharding: str, reduction: str, size: int) -> None:
    expected = train_plain()
    for numbers in run_ranks(ranks, train_prepared, sharding, reduction, size):
        for ours, theirs in zip(numbers, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)

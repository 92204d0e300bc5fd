"""Ranks that run out of data at different times stop together, and train on all of their data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import UserError

LENGTHS = {2: (4, 1), 3: (2, 0, 5)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch_of(rank: int, number: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(100 * rank + number)
    rows = 1 + (rank + number) % 3
    return {
        "x": torch.randn(rows, 6, generator=draw),
        "more": [torch.randint(4, (rows,), generator=draw), {"name": f"{rank}-{number}", "number": number}],
    }


def loss_of(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["more"][0], reduction="sum"), len(batch["x"])


def train_in_one_process(lengths: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step, in one process that gets the batches of all ranks."""
    model, steps = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(max(lengths)):
        parts = [loss_of(model, batch_of(rank, number)) for rank, length in enumerate(lengths) if number < length]
        loss = torch.stack([part for part, _ in parts]).sum() / sum(rows for _, rows in parts)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


def train_on_uneven_ranks(lengths: tuple[int, ...], sharding: str) -> tuple[list[tuple[float, float]], int]:
    """Return loss and gradient norm of each step, and how many batches of this rank were used."""
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), Net()
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    steps, num_used = [], 0

    def own_batches() -> Any:
        nonlocal num_used
        for number in range(lengths[rank]):
            num_used += 1
            yield batch_of(rank, number)

    for batch in loop.uneven_batches(own_batches()):
        loss, rows = loss_of(model, batch)
        loop.backward(loss, num_tokens=rows)
        result = loop.step()
        steps.append((float(result.loss), float(result.grad_norm)))
    assert list(loop.uneven_batches([])) == []
    with pytest.warns(FutureWarning, match=r"Loop.rounds is now Loop.uneven_batches; .* Trimaran 0.3"):
        assert list(loop.rounds([])) == []
    loop.backward(model(torch.ones(1, 6)).sum(), num_tokens=1)  # later batches count again
    assert float(loop.step().num_tokens) == len(lengths)
    return steps, num_used


@pytest.mark.parametrize(
    ("ranks", "sharding"), [(2, "none"), (3, "parameters"), *map(slow, [(3, "none"), (2, "gradients")])]
)
def test_uneven_ranks_train_on_all_their_batches_and_stop_together(ranks: int, sharding: str) -> None:
    expected = train_in_one_process(LENGTHS[ranks])
    answers = run_ranks(ranks, train_on_uneven_ranks, LENGTHS[ranks], sharding, timeout=60.0)
    for rank, (steps, num_used) in enumerate(answers):
        assert num_used == LENGTHS[ranks][rank]
        assert len(steps) == max(LENGTHS[ranks])
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def run_without_a_batch() -> str:
    dist.init_process_group("gloo")
    loop = trimaran.prepare(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UserError) as refusal:
        next(iter(loop.uneven_batches([{"x": torch.ones(2), "what": object()}] if loop.rank else [])))
    return refusal.value.code


def test_a_batch_that_cannot_be_borrowed_is_refused_on_all_ranks() -> None:
    assert run_ranks(2, run_without_a_batch, timeout=60.0) == ["T061", "T061"]

"""Ranks that run out of data at different times end at the same one, and train on all of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import trimaran
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


def by_hand(lengths: tuple[int, ...]) -> list[tuple[float, float]]:
    """One process that meets in each round what the ranks meet."""
    model, found = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(max(lengths)):
        parts = [loss_of(model, batch_of(rank, number)) for rank, length in enumerate(lengths) if number < length]
        loss = torch.stack([part for part, _ in parts]).sum() / sum(rows for _, rows in parts)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def by_rounds(lengths: tuple[int, ...], sharding: str) -> tuple[list[tuple[float, float]], int]:
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), Net()
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    found, given = [], 0

    def own() -> Any:
        nonlocal given
        for number in range(lengths[rank]):
            given += 1
            yield batch_of(rank, number)

    for batch in loop.rounds(own()):
        loss, rows = loss_of(model, batch)
        loop.backward(loss, num_tokens=rows)
        result = loop.step()
        found.append((float(result.loss), float(result.grad_norm)))
    assert list(loop.rounds([])) == []
    loop.backward(model(torch.ones(1, 6)).sum(), num_tokens=1)  # what comes after the rounds counts again
    assert float(loop.step().num_tokens) == len(lengths)
    return found, given


@pytest.mark.parametrize(("ranks", "sharding"), [(2, "none"), (3, "none"), (2, "gradients"), (3, "parameters")])
def test_uneven_ranks_train_on_all_their_batches_and_end_together(ranks: int, sharding: str) -> None:
    expected = by_hand(LENGTHS[ranks])
    for rank, (found, given) in enumerate(run_ranks(ranks, by_rounds, LENGTHS[ranks], sharding, timeout=60.0)):
        assert given == LENGTHS[ranks][rank]
        assert len(found) == max(LENGTHS[ranks])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def without_a_batch() -> str:
    dist.init_process_group("gloo")
    loop = trimaran.prepare(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UserError) as refusal:
        next(iter(loop.rounds([{"x": torch.ones(2), "what": object()}] if loop.rank else [])))
    return refusal.value.code


def test_a_batch_that_cannot_be_lent_is_refused_by_all_ranks_at_once() -> None:
    assert run_ranks(2, without_a_batch, timeout=60.0) == ["T061", "T061"]

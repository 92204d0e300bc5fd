"""`trimaran.prepare`: any module and loop trains on several ranks as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks

STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(32, (8, 10), generator=draw) for _ in range(2))
    targets[torch.rand(8, 10, generator=draw) < torch.arange(8)[:, None] / 10] = -100  # later rows have fewer
    return {"tokens": tokens, "targets": targets}


def train_plain() -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a plain PyTorch loop in one process."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_prepared(sharding: str, size: int) -> tuple[list[float], list[float], bool]:
    """Return losses and gradient norms of the same loop with `prepare`, and whether parameter names are unchanged."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank initialises differently; all must get rank 0's weights
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    results = []
    for step in range(STEPS):
        for micro in loop.micro_batches(batch_of(step), size=size):
            logits = model(micro["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1), micro["targets"].flatten(), ignore_index=-100, reduction="sum")
            loop.backward(loss, num_tokens=(micro["targets"] >= 0).sum())
        results.append(loop.step(clip_norm=0.5))
    same_names = [name for name, _ in model.named_parameters()] == names
    return [float(each.loss) for each in results], [float(each.grad_norm) for each in results], same_names


@pytest.mark.parametrize(
    ("sharding", "size"), [("none", 4), ("optimizer", 1), ("parameters", 4), slow(("gradients", 4))]
)
def test_two_ranks_train_like_the_plain_loop(sharding: str, size: int) -> None:
    losses, norms = train_plain()
    for ours, our_norms, same_names in run_ranks(2, train_prepared, sharding, size):
        assert ours == pytest.approx(losses, rel=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-5)
        assert same_names


def train_partly_frozen(sharding: str) -> list[float]:
    """Return losses and gradient norms of a few steps with a frozen embedding and one frozen layer."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, numbers = Net(), []
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    for step in range(3):
        for micro in loop.micro_batches(batch_of(step), size=2):
            logits, targets = model(micro["tokens"]).flatten(0, 1), micro["targets"].flatten()
            loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            loop.backward(loss, num_tokens=int((targets >= 0).sum()))
        result = loop.step()
        numbers += [float(result.loss), float(result.grad_norm)]
    return numbers


@pytest.mark.parametrize("sharding", ["parameters", *map(slow, ("none", "optimizer", "gradients"))])
def test_frozen_parameters_are_not_part_of_the_norm_on_any_number_of_ranks(sharding: str) -> None:
    (one_rank,) = run_ranks(1, train_partly_frozen, "none")
    for numbers in run_ranks(2, train_partly_frozen, sharding):
        assert numbers == pytest.approx(one_rank, rel=1e-5)

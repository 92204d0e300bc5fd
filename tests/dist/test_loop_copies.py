"""Copies of a model that follow it, norms of weights in a loss, and what a sharded model refuses."""

import contextlib
import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import UserError

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * self.scale

    def scale_head(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)


def batch_of(step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def loss_of(net: Net, target: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = target(x) + target.features(x)  # pyrefly: ignore[not-callable]
    return (net(x) - wanted - x).square().sum()


def plain() -> tuple[list[float], list[Tensor]]:
    """Return the losses of a loop with a target network, and the target's weights at the end."""
    torch.manual_seed(0)
    net = Net()
    target, optimizer, losses = copy.deepcopy(net).eval(), SGD(net.parameters(), lr=0.1), []
    for step in range(STEPS):
        loss = loss_of(net, target, batch_of(step)) / 6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for slow_one, fast_one in zip(target.parameters(), net.parameters(), strict=True):
                slow_one.lerp_(fast_one, 0.25)
            for slow_one, fast_one in zip(target.buffers(), net.buffers(), strict=True):
                slow_one.copy_(fast_one)
    return losses, [each.detach() for each in target.parameters()]


def prepared(sharding: str, folder: Path, until: int) -> tuple[list[float], list[Tensor]]:
    """Return the same of a prepared loop, which resumes where the last one stopped."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1), sharding=sharding, batch_norm="sync", check_loss=False)
    target = loop.copy_of(net)
    losses = []
    for step in range(loop.resume(folder), until):
        rows = loop.local_rows(batch_of(step))
        loop.backward(loss_of(net, target, rows), num_samples=len(rows), reduction="sum")
        losses.append(float(loop.step().loss))
        loop.update_copy(target, decay=0.75)
    loop.save(folder, until)
    weights = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in target.parameters()]
    return losses, weights


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [(2, "none"), (2, "parameters"), *map(slow, [(3, "parameters"), (2, "optimizer")])],
)
def test_a_copy_follows_its_model_and_resumes(ranks: int, sharding: str, tmp_path: Path) -> None:
    losses, weights = plain()
    first = run_ranks(ranks, prepared, sharding, tmp_path, 2)
    second = run_ranks(ranks, prepared, sharding, tmp_path, STEPS)
    for (before, _), (after, ours) in zip(first, second, strict=True):
        assert before + after == pytest.approx(losses, rel=1e-4)
        for mine, expected in zip(ours, weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def averaged() -> list[float]:
    dist.init_process_group("gloo")
    net = Net()
    loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1), batch_norm="sync")
    average = AveragedModel(net)
    rows = loop.local_rows(batch_of(0))
    loop.backward(net(rows).square().sum(), num_samples=len(rows), reduction="sum")
    loop.step()
    average.update_parameters(net)
    return [float(each.sum()) for each in average.module.parameters()] + [
        float(each.sum()) for each in net.parameters()
    ]


def test_a_replicated_model_is_copied_by_deepcopy() -> None:
    first, second = run_ranks(2, averaged)
    assert first == second
    assert first[: len(first) // 2] == first[len(first) // 2 :]


def refusals(folder: Path) -> list[str]:
    dist.init_process_group("gloo")
    net = Net()
    loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1), sharding="parameters", batch_norm="frozen")
    rows = loop.local_rows(batch_of(0))
    with_copy = loop.copy_of(net)
    loop.save(folder, 1)
    other = Net()
    without_copy = trimaran.prepare(other, SGD(other.parameters(), lr=0.1), sharding="parameters")
    weight: nn.Parameter = net.layers[0][0].weight  # pyrefly: ignore
    messages = []
    for mistake in (
        lambda: copy.deepcopy(net),
        lambda: AveragedModel(net),
        lambda: loop.copy_of(net.head),
        lambda: loop.update_copy(net, decay=0.5),
        lambda: loop.update_copy(with_copy, decay=1.5),
        net.scale_head,
        lambda: without_copy.resume(folder),
        lambda: loop.backward(net(rows).square().sum() + weight.norm() ** 2, num_samples=len(rows)),
    ):
        with pytest.raises(UserError) as caught:
            mistake()
        messages.append(str(caught.value))
    shown = io.StringIO()
    try:
        rows @ net.layers[0][0].weight  # pyrefly: ignore
    except RuntimeError as error:
        with contextlib.redirect_stderr(shown):
            sys.excepthook(type(error), error, error.__traceback__)
    return [*messages, shown.getvalue()]


def test_what_a_sharded_model_refuses_names_the_way(tmp_path: Path) -> None:
    for *messages, shown in run_ranks(2, refusals, tmp_path):
        assert [each[:4] for each in messages] == [*["P137"] * 5, "P136", "K085", "P136"]
        assert "loop.copy_of(model)" in messages[0]
        assert "P136: this line computes with weights" in shown
        assert "loop.parameter_norm()" in shown


def with_a_penalty(sharding: str, size: int) -> list[float]:
    """Return losses and gradient norms with a penalty on the weights in the loss."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1), sharding=sharding, batch_norm="frozen")
    numbers = []
    for step in range(3):
        for rows in loop.micro_batches(batch_of(step), size=size):
            penalty = 0.1 * loop.parameter_norm() ** 2 + 0.2 * loop.parameter_norm([net.head.weight])
            loop.backward((net(rows) - rows).square().sum() + len(rows) * penalty, num_samples=len(rows))
        result = loop.step(clip_norm=2.0)
        numbers += [float(result.loss), float(result.grad_norm)]
    return numbers


def plain_penalty() -> list[float]:
    torch.manual_seed(0)
    net = Net()
    for each in net.modules():
        each.train(not isinstance(each, nn.BatchNorm1d))
    optimizer, numbers = SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        x = batch_of(step)
        squares = torch.stack([each.square().sum() for each in net.parameters()]).sum()
        loss = (net(x) - x).square().sum() / 6 + 0.1 * squares + 0.2 * net.head.weight.norm()
        loss.backward()
        numbers += [loss.item(), float(nn.utils.clip_grad_norm_(net.parameters(), 2.0))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


@pytest.mark.parametrize(
    ("ranks", "sharding", "size"),
    [
        (2, "none", 3),
        (2, "parameters", 1),
        *map(slow, [(3, "parameters", 6), (2, "optimizer", 1)]),
    ],
)
def test_a_penalty_on_weights_trains_like_the_plain_loop(ranks: int, sharding: str, size: int) -> None:
    expected = plain_penalty()
    for numbers in run_ranks(ranks, with_a_penalty, sharding, size):
        assert numbers == pytest.approx(expected, rel=1e-4)

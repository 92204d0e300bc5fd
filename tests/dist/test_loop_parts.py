"""A loop that does not simply call its model: parts, frozen and unused parameters, branches, several backwards."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import UserError
from trimaran.loop import gradient_reduction, sharded_parts

STEPS = 4


class Net(nn.Module):
    """Has parts to call one by one, a branch, a part that nobody uses, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.branch = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.head.weight

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def fresh_state(self) -> Tensor:
        return next(self.parameters()).new_zeros(6)


def batch_of(step: int) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step))


Loss = Callable[[Net, Tensor, int], Tensor]


def by_parts(net: Net, x: Tensor, step: int) -> Tensor:
    return (net.head(net.encode(x)) + net.fresh_state() - x).square().sum()


def by_parts_the_other_way_around(net: Net, x: Tensor, step: int) -> Tensor:
    return (net.head(x) - net.layers[1](x)).square().sum()


def thawed_and_frozen(net: Net, x: Tensor, step: int) -> Tensor:
    net.head.requires_grad_(step >= 1)
    net.encoder.requires_grad_(step < 2)
    return (net(x) - x).square().sum()


def branching(net: Net, x: Tensor, step: int) -> Tensor:
    rare = x[x[:, 0] > 0.8]  # rows of some ranks only, or of none
    out = net(x).square().sum()
    return out + net.branch(rare).square().sum() if len(rare) else out


def without_some_ranks(net: Net, x: Tensor, step: int) -> Tensor:
    rare = x[x[:, 0] > 0.8]
    return net(rare).square().sum() if len(rare) else torch.zeros(())


def checkpointed(net: Net, x: Tensor, step: int) -> Tensor:
    y = checkpoint(net.tied, net.encode(x), use_reentrant=True)
    return (checkpoint(net.head, y, use_reentrant=True) - x).square().sum()


def train(loss_of: Loss, net: Net, optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Yield the weights after each step of a plain loop."""
    for step in range(STEPS):
        loss_of(net, batch_of(step), step).div(7).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield [each.detach().clone() for each in net.parameters()]


def differences(loss_of: Loss, sharding: str, size: int, make: Callable[[], Any] = Net) -> tuple[float, list[str]]:
    """Return the largest difference to a plain loop, and the optimizer's states at the end."""
    torch.manual_seed(0)
    plain, net = make(), make()
    net.load_state_dict(plain.state_dict())
    reference = train(loss_of, plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
    loop = trimaran.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), sharding=sharding)
    most = 0.0
    for step, expected in enumerate(reference):
        for rows in loop.micro_batches(batch_of(step), size=size):
            loop.backward(loss_of(net, rows, step), num_samples=len(rows), reduction="sum")
        loop.step()
        weights = list(loop.state_dict().values())
        most = max(
            [most, *((a - b).abs().max().item() for a, b in zip(weights, _stored(plain, expected), strict=False))]
        )
    names = {id(each): name for name, each in net.named_parameters()}
    return most, sorted(names[id(each)] for each, state in loop.optimizer.state.items() if state)


def _stored(plain: nn.Module, values: list[Tensor]) -> list[Tensor]:
    """Return the values in the order of the state dict, which names tied weights twice."""
    by_id = {id(each): value for each, value in zip(plain.parameters(), values, strict=True)}
    return [by_id[id(each)] for each in plain.state_dict(keep_vars=True).values()]


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (by_parts, by_parts_the_other_way_around, thawed_and_frozen, branching, without_some_ranks,
                 checkpointed)
}  # fmt: skip


def differences_of_compiled(after: bool, backend: str) -> list[float]:
    """Return the largest differences to a plain loop with a model that is compiled before or after `prepare`."""
    gradient_reduction.FIRST_BUCKET_BYTES = gradient_reduction.BUCKET_BYTES = 300
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    compiled: Any = torch.compile(net, backend=backend)
    loop = trimaran.prepare(net if after else compiled, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    differences = []
    for step, expected in enumerate(train(plainly, plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))):
        for rows in loop.micro_batches(batch_of(step), size=2):
            loop.backward(plainly(compiled, rows, step), num_samples=len(rows), reduction="sum")
        loop.step()
        differences += [(a - b).abs().max().item() for a, b in zip(net.parameters(), expected, strict=True)]
    return differences


@pytest.mark.parametrize(
    ("after", "backend"), [(False, "eager"), *map(slow, [(False, "aot_eager"), (True, "aot_eager")])]
)
def test_a_compiled_model_trains_like_the_plain_loop(after: bool, backend: str) -> None:
    for differences in run_ranks(2, differences_of_compiled, after, backend):
        assert max(differences) < 1e-5


def differences_of_all() -> dict[str, Any]:
    gradient_reduction.FIRST_BUCKET_BYTES = gradient_reduction.BUCKET_BYTES = 300  # several buckets
    dist.init_process_group("gloo")
    return {f"{name} {size}": differences(LOSSES[name], "none", size) for name in LOSSES for size in (1, 4)}


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_every_gradient_is_reduced_whatever_the_loss_is_made_of(ranks: int) -> None:
    for answers in run_ranks(ranks, differences_of_all):
        for name, (difference, trained) in answers.items():
            assert difference < 1e-5, name
            assert not [each for each in trained if "unused" in each], f"{name}: an unused parameter was updated"
    assert "branch.weight" in answers["branching 4"][1]


class Containers(nn.Module):
    """Its layers are lists themselves, as in x-transformers, two layers share a weight, and a scalar is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(6), nn.Linear(6, 6), nn.Identity()]) for _ in range(3))
        self.layers[2][1].weight = self.layers[1][1].weight  # pyrefly: ignore
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer, last in self.layers:  # pyrefly: ignore
            x = last(x + layer(norm(x)))
        return x * self.scale.exp()


def two_modules() -> nn.ModuleDict:
    """Return a model and a head that are trained together, in a container that has no forward."""
    return nn.ModuleDict({"model": nn.Linear(6, 6), "head": nn.Sequential(nn.Linear(6, 6), nn.Tanh())})


def by_two_modules(net: Any, x: Tensor, step: int) -> Tensor:
    return (net["head"](net["model"](x)) - x).square().sum()


class Branching(nn.Module):
    """Calls one of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


def branch_by_rank(first_step: int) -> str:
    """Return the error of ranks that call different blocks from this step on."""
    sharded_parts.CHECK_EVERY = 4  # pyrefly: ignore[bad-assignment]
    dist.init_process_group("gloo")
    net = Branching()
    loop = trimaran.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), sharding="parameters", check_loss=False)
    try:
        for step in range(8):
            rows = loop.local_rows(batch_of(step))
            out = net(rows, loop.rank if step >= first_step else 0)
            loop.backward(out.square().sum(), num_samples=len(rows), reduction="sum")
            loop.step()
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_blocks_do_not_mix_their_weights() -> None:
    messages = run_ranks(2, branch_by_rank, 1)
    assert all(message.startswith("P046: ") for message in messages)
    assert "made a call of layers.0" in messages[0]
    assert "rank 1 made a call of layers.1 in its place" in messages[0]
    assert all(message.startswith("P139: ") for message in run_ranks(2, branch_by_rank, 2))


def split_a_graph() -> str:
    dist.init_process_group("gloo")
    net = nn.Linear(4, 4)
    loop = trimaran.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UserError) as caught:
        loop.local_rows((torch.ones(6, 4), torch.eye(6).to_sparse(), torch.zeros(6)))
    return str(caught.value)


def test_the_nodes_of_one_graph_are_no_rows() -> None:
    assert all(message.startswith("P040: ") and "6 x 6" in message for message in run_ranks(2, split_a_graph))


SHARDED: dict[str, Loss] = {
    name: LOSSES[name] for name in ("by_parts", "by_parts_the_other_way_around", "thawed_and_frozen", "checkpointed")
}


def plainly(net: Any, x: Tensor, step: int) -> Tensor:
    return (net(x) - x).square().sum()


def differences_of_sharded(sharding: str) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    answers = {name: differences(SHARDED[name], sharding, 4) for name in SHARDED}
    answers["micro-batches of one row"] = differences(SHARDED["by_parts"], sharding, 1)
    answers["containers"] = differences(plainly, sharding, 4, Containers)
    return answers | {"without a forward": differences(by_two_modules, sharding, 4, two_modules)}


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [(2, "parameters"), *map(slow, [(2, "optimizer"), (3, "parameters"), (2, "gradients")])],
)
def test_parts_of_a_sharded_model_are_gathered(ranks: int, sharding: str) -> None:
    for answers in run_ranks(ranks, differences_of_sharded, sharding):
        for name, (difference, _) in answers.items():
            assert difference < 1e-5, name

"""BatchNorm in a user's own loop: which statistics it uses when a batch is split over ranks and micro-batches."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trimaran
from tests.ranks import run_ranks
from trimaran.core import UserError

STEPS = 4
BATCH = 8


class Net(nn.Module):
    """Convolutions and a classifier, with BatchNorm in three settings: default, not affine, and not tracking."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)) for _ in range(2))
        self.plain = nn.BatchNorm1d(6, affine=False, momentum=None)
        self.untracked: nn.Module = nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(images)).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.untracked(self.plain(x.mean((2, 3)))))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 8, 8, generator=draw) * torch.arange(1, BATCH + 1).view(-1, 1, 1, 1)
    return images + 10, torch.randint(5, (BATCH,), generator=draw)  # rows differ, with means far from zero


def build_net() -> Net:
    torch.manual_seed(1)
    model = Net()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            assert each.running_mean is not None
            assert each.running_var is not None
            each.running_mean.fill_(3.0)
            each.running_var.fill_(20.0)
    return model


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    full = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in model.state_dict().items()
    }
    return {name: each.detach().numpy().copy() for name, each in full.items()}


def train_plain(frozen: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses and the final state of one process that sees the full batch at once."""
    model = build_net()
    if frozen:
        model.untracked = nn.Identity()
        for each in (model.norm, model.plain, *(block.get_submodule("1") for block in model.blocks)):
            each.eval()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        images, labels = batch_of(step)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state_of(model)


def train_prepared(batch_norm: str, sharding: str, size: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses and the final state of this rank. Only `local` may warn."""
    warnings.simplefilter("ignore" if batch_norm == "local" else "error")
    dist.init_process_group("gloo")
    model = build_net()
    if batch_norm == "frozen":
        model.untracked = nn.Identity()
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = trimaran.prepare(model, optimizer, sharding=sharding, batch_norm=batch_norm)
    losses: list[float] = []
    for step in range(STEPS):
        model.train()
        for images, labels in loop.micro_batches(batch_of(step), size=size):
            loop.backward(F.cross_entropy(model(images), labels, reduction="sum"), num_tokens=len(labels))
        losses.append(float(loop.step().loss))
    assert list(model.state_dict()) == names
    return losses, state_of(model)


def test_sync_statistics_on_two_ranks_equal_those_of_the_full_batch() -> None:
    losses, state = train_plain(frozen=False)
    for ours, our_state in run_ranks(2, train_prepared, "sync", "parameters", BATCH // 2):
        assert ours == pytest.approx(losses, rel=1e-5)
        assert our_state.keys() == state.keys()
        for name, each in state.items():  # weights, which depend on gradients, and running statistics
            assert our_state[name] == pytest.approx(each, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_statistics_make_accumulation_exact(world_size: int) -> None:
    losses, state = train_plain(frozen=True)
    for ours, our_state in run_ranks(world_size, train_prepared, "frozen", "none", 2):
        assert ours == pytest.approx(losses, rel=1e-5)
        for name, each in state.items():
            assert our_state[name] == pytest.approx(each, rel=1e-4, abs=1e-5), name
        assert (our_state["norm.running_mean"] == 3.0).all()
        assert not np.array_equal(our_state["norm.weight"], np.ones(6)), "scale and shift are still trained"


def test_local_statistics_train_differently() -> None:
    losses, _ = train_plain(frozen=False)
    for ours, _ in run_ranks(2, train_prepared, "local", "none", BATCH // 2):
        assert ours != pytest.approx(losses, rel=1e-3)


def warnings_of(batch_norm: str, size: int, evaluate: bool = False) -> list[str]:
    dist.init_process_group("gloo")
    model = build_net()
    model.untracked = nn.Identity()
    loop = trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm=batch_norm)
    model.train(not evaluate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(loop.micro_batches(batch_of(0), size=size))
    assert all(each.filename == __file__ for each in caught), "the warning points at the user's own line"
    dist.barrier()  # nothing above waits for the other rank
    return [str(each.message) for each in caught]


def test_wrong_statistics_are_warned_of_once() -> None:
    for on_two_ranks in run_ranks(2, warnings_of, "local", BATCH // 2):
        (message,) = on_two_ranks
        assert "on 2 ranks" in message
        assert "batch_norm='sync'" in message
    for accumulating in (*run_ranks(1, warnings_of, "local", 2), *run_ranks(2, warnings_of, "sync", 2)):
        (message,) = accumulating
        assert "micro-batches" in message
        assert "batch_norm='frozen'" in message
    assert run_ranks(1, warnings_of, "local", BATCH) == [[]]
    assert run_ranks(2, warnings_of, "sync", BATCH // 2) == [[], []]
    assert run_ranks(2, warnings_of, "frozen", 2) == [[], []]
    assert run_ranks(2, warnings_of, "local", 2, True) == [[], []]


def messages_of_mistakes() -> list[str]:
    model, messages = build_net(), []
    for batch_norm in ("synced", "frozen"):
        with pytest.raises(UserError) as caught:
            trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm=batch_norm)
        messages.append(f"{caught.value.code} {caught.value.what}")
    return messages


def test_an_unknown_mode_and_a_layer_without_running_statistics_are_refused() -> None:
    ((mode, layer),) = run_ranks(1, messages_of_mistakes)
    assert mode.startswith("P042")
    assert layer.startswith("P043")
    assert "untracked" in layer

"""`loop.save` and `loop.resume`: a user's own loop resumes exactly, on any number of ranks."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.checkpoint import file_parts, write_checkpoint
from trimaran.core import UserError

STEPS = 6
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


class Net(nn.Module):
    """A network with sizes that do not divide evenly over ranks, a buffer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 18)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(18, 18), nn.BatchNorm1d(18)) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(18, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.drop(x))


Answer = tuple[int, list[float], list[float], list[int]]


def run_loop(folder: Path, *, until: int, kind: str = "adamw", sharding: str = "none", drop: float = 0.2) -> Answer:
    """Return the first step, the losses, the last learning rates with BatchNorm's means, and the saved steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Net()
    model.drop.p = drop
    optimizer = OPTIMIZERS[kind](model)
    loop = trimaran.prepare(model, optimizer, sharding=sharding, batch_norm="sync")
    start = loop.resume(folder)
    losses = []
    for step in range(start, until):
        draw = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(31, (12, 5), generator=draw) for _ in range(2))
        for each, target in loop.micro_batches((tokens, targets), size=12 // loop.world_size):
            loop.backward(F.cross_entropy(model(each), target.flatten(), reduction="sum"), num_tokens=target.numel())
        losses.append(loop.step().loss.item())
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if (step + 1) % 2 == 0:
            loop.save(folder, step + 1)
    mean = model.get_buffer("layers.0.1.running_mean").tolist()
    rates = [group["lr"] for group in optimizer.param_groups]
    return start, losses, rates + mean, sorted(int(each.name[5:]) for each in folder.iterdir())


def run_on_ranks(folder: Path, options: dict[str, Any]) -> Answer:
    folder.mkdir(exist_ok=True)
    return run_loop(folder, **options)


def run_on_one_rank(folder: Path, options: dict[str, Any], part_bytes: int = file_parts.PART_BYTES) -> Answer:
    file_parts.PART_BYTES = part_bytes
    folder.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return run_loop(folder, **options)


@cache
def train_uninterrupted(kind: str = "adamw", sharding: str = "parameters") -> list[Answer]:
    with TemporaryDirectory() as folder:
        return run_ranks(2, run_on_ranks, Path(folder), {"until": STEPS, "kind": kind, "sharding": sharding})


@pytest.mark.parametrize(("kind", "sharding"), [("adamw", "parameters"), slow(("sgd", "none"))])
def test_a_loop_that_is_started_again_resumes_exactly(kind: str, sharding: str, tmp_path: Path) -> None:
    options = {"kind": kind, "sharding": sharding}
    reference = train_uninterrupted(kind, sharding)
    first = run_ranks(2, run_on_ranks, tmp_path / "interrupted", {"until": 4} | options)
    second = run_ranks(2, run_on_ranks, tmp_path / "interrupted", {"until": STEPS} | options)
    for before, after, uninterrupted in zip(first, second, reference, strict=True):
        assert (before[0], after[0]) == (0, 4)
        assert before[1] + after[1] == uninterrupted[1]
        assert after[2:] == uninterrupted[2:]
        assert after[3] == [4, 6], "the newest two are kept"


def test_the_number_of_ranks_and_the_sharding_may_change(tmp_path: Path) -> None:
    options = {"kind": "adagrad", "drop": 0.0}  # dropout depends on the number of ranks
    ((_, reference, _, _),) = run_ranks(1, run_on_one_rank, tmp_path / "one", {"until": STEPS} | options)
    legs = [
        run_ranks(3, run_on_ranks, tmp_path / "many", {"until": 2, "sharding": "parameters"} | options),
        run_ranks(1, run_on_one_rank, tmp_path / "many", {"until": 4} | options),
        run_ranks(2, run_on_ranks, tmp_path / "many", {"until": STEPS, "sharding": "gradients"} | options),
    ]
    assert [leg[0][0] for leg in legs] == [0, 2, 4]
    assert [loss for leg in legs for loss in leg[0][1]] == pytest.approx(reference, rel=1e-5)


def run_with_a_kill_during_a_save(folder: Path) -> None:
    """Kill rank 1 between two files of its second save."""
    dist.init_process_group("gloo")
    write = write_checkpoint.write_content

    def write_or_die(path: Path, *rest: Any) -> Any:
        if dist.get_rank() == 1 and "00000004" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *rest)

    write_checkpoint.write_content = write_or_die  # pyrefly: ignore[bad-assignment]
    folder.mkdir(exist_ok=True)
    run_loop(folder, until=STEPS, sharding="parameters")


def test_a_kill_in_the_middle_of_a_save_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1: died without a result"):
        run_ranks(2, run_with_a_kill_during_a_save, tmp_path / "run")
    assert [each.name for each in (tmp_path / "run").iterdir() if not each.name.startswith(".")] == ["step-00000002"]
    answers = run_ranks(2, run_on_ranks, tmp_path / "run", {"until": STEPS, "sharding": "parameters"})
    assert [(answer[0], answer[1]) for answer in answers] == [(2, answer[1][2:]) for answer in train_uninterrupted()]


def test_a_loop_does_not_start_over_with_a_state_that_is_half_filled(tmp_path: Path) -> None:
    run_ranks(1, run_on_one_rank, tmp_path / "run", {"until": 2}, 4096)
    file = tmp_path / "run" / "step-00000002" / "rank-00000.safetensors"
    assert "part_sha256" in (file.parent / "manifest.json").read_text()
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match=r"K047: .*step 2: rank-00000\.safetensors is not what was written"):
        run_ranks(1, run_on_one_rank, tmp_path / "run", {"until": 4}, 4096)


class RowOptimizer(torch.optim.Optimizer):
    """Has a state with a number per local row, similar to Adafactor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for each in self.param_groups[0]["params"]:
            local = each.to_local() if hasattr(each, "to_local") else each
            self.state[each]["rows"] = torch.zeros(local.shape[0] + 1)


def save_a_state_of_another_shape(folder: Path) -> str:
    dist.init_process_group("gloo")
    model = Net()
    loop = trimaran.prepare(model, RowOptimizer(model), sharding="parameters")
    loop.optimizer.step()
    with pytest.raises(UserError) as caught:
        loop.save(folder, 1)
    return str(caught.value)


def test_an_optimizer_state_of_another_shape_than_its_shard_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, save_a_state_of_another_shape, tmp_path):
        assert message.startswith("K031: the optimizer's state rows of embed.weight has shape [1")

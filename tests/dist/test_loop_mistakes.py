"""Mistakes in a user's own loop that would hang, or train the wrong thing in silence, are errors on the spot."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trimaran
from tests.ranks import run_ranks
from trimaran import Loop
from trimaran.core import UserError


def build(sharding: str = "none") -> Loop:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sharding=sharding)


def step_on(loop: Loop, batch: Tensor) -> float:
    for rows in loop.micro_batches(batch, size=2):
        loop.backward(loop.model(rows).square().sum(), num_samples=len(rows))
    return float(loop.step().loss)


ALONE: dict[str, Callable[[Loop, Path], Any]] = {
    "save": lambda loop, folder: loop.save(folder, 1),
    "evaluate": lambda loop, folder: loop.evaluate(lambda rows: len(rows), [torch.ones(4, 4)]),
    "state_dict": lambda loop, folder: loop.state_dict(),
    "the model": lambda loop, folder: loop.model.eval()(torch.ones(2, 4)),
    "no_grad": lambda loop, folder: torch.no_grad()(loop.model)(torch.ones(2, 4)),
    "model.state_dict": lambda loop, folder: loop.model.state_dict(),
}


def call_on_one_rank(name: str, sharding: str, folder: Path, caller: int) -> str:
    """Return the error of the rank that makes the call alone, while the other trains on."""
    loop, refused = build(sharding), folder / "refused"
    for _ in range(6):  # past the first steps, in which every batch is compared
        step_on(loop, torch.ones(4, 4))
    if loop.rank != caller:  # it waits in a collective for the caller, in a thread of its own
        Thread(target=step_on, args=(loop, torch.ones(4, 4)), daemon=True).start()
        while not refused.exists():
            time.sleep(0.02)
        return ""
    with pytest.raises(UserError) as caught:
        ALONE[name](loop, folder)
    refused.touch()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sharding", "caller"),
    [
        ("save", "none", 0),
        ("evaluate", "none", 1),
        ("state_dict", "parameters", 0),
        ("the model", "parameters", 0),
        ("no_grad", "gradients", 0),
        ("model.state_dict", "parameters", 1),
    ],
)
def test_a_call_of_one_rank_alone_is_an_error_there(name: str, sharding: str, caller: int, tmp_path: Path) -> None:
    message = run_ranks(2, call_on_one_rank, name, sharding, tmp_path, caller, timeout=60.0)[caller]
    assert message.startswith(f"P046: rank {caller} made ")
    assert f"but rank {1 - caller} made " in message
    assert "on every rank" in message


def call_on_all_ranks(folder: Path) -> list[Any]:
    loop = build("parameters")
    step_on(loop, torch.ones(4, 4))
    if loop.rank == 1:
        time.sleep(0.5)  # a slow rank is waited for
    answers = [call(loop, folder) for name, call in ALONE.items() if name not in ("the model", "no_grad")]
    answers += [ALONE["the model"](loop, folder).shape, ALONE["no_grad"](loop, folder).shape]
    loop.model.train()
    return [answers[1], list(answers[2]), list(answers[3]), step_on(loop, torch.ones(4, 4))]


def test_the_same_calls_on_all_ranks_are_fine(tmp_path: Path) -> None:
    main, other = run_ranks(2, call_on_all_ranks, tmp_path)
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert main[:3] == [4.0, names, names]
    assert other[:3] == [4.0, [], names]
    assert main[3] == other[3]


def evaluate_on_main_alone(sharding: str) -> tuple[bool, list[float]]:
    """Return whether rank 0 may call the unsharded model alone before the first step, as nanoGPT does."""
    loop = build(sharding)
    with torch.no_grad():
        is_equal = not loop.is_main or bool(torch.isfinite(loop.model(torch.ones(2, 4))).all())
    return is_equal, [step_on(loop, torch.ones(4, 4)) for _ in range(2)]


def test_the_main_rank_alone_may_call_an_unsharded_model() -> None:
    first, second = run_ranks(2, evaluate_on_main_alone, "none")
    assert first == second


def train_on_different_batches(kind: str, ranks: int) -> str:
    loop = build()
    draw = torch.Generator().manual_seed(0)
    try:
        for step in range(60):
            if kind == "generator" and step == 3 and loop.rank == ranks - 1:
                torch.rand(1, generator=draw)  # only this rank draws
            if kind == "later" and step == 27 and loop.is_main:
                torch.rand(1, generator=draw)
            if kind == "rows" and step == 2 and loop.is_main:
                step_on(loop, torch.rand(6, 4, generator=draw))
            step_on(loop, torch.rand(8, 4, generator=draw))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("generator", 3, "3: rank 2 holds other rows than ranks 0, 1 (they agreed in step 2)"),
        ("later", 2, "40: rank 1 holds other rows than rank 0 (they agreed in step 20)"),
        ("rows", 2, "2: rank 0 has 6 rows; rank 1 has 8 rows (they agreed in step 1)"),
    ],
)
def test_ranks_with_different_batches_are_named(kind: str, ranks: int, expected: str) -> None:
    for message in run_ranks(ranks, train_on_different_batches, kind, ranks):
        assert message.startswith(f"P045: ranks hold different global batches in step {expected}")
        assert "an evaluation on the main rank alone" in message


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def codes_of_mistakes() -> list[str]:
    loop = trimaran.prepare(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=1.0))
    rows = torch.ones(6, 4)

    def mean() -> Tensor:
        return F.mse_loss(model(rows), torch.zeros(6, 4))

    codes = []
    for mistake in (
        lambda: list(loop.micro_batches(torch.ones(0, 4), size=2)),
        lambda: list(loop.micro_batches((torch.ones(4, 4), torch.ones(5)), size=2)),
        lambda: trimaran.prepare(model, loop.optimizer, sharding="zero"),
        lambda: loop.backward(mean(), num_samples=6),
        lambda: loop.backward(mean()),
        lambda: loop.backward(mean(), num_samples=6, num_tokens=6),
        lambda: loop.evaluate(lambda batch: model(batch), [rows]),
        lambda: loop.evaluate(lambda batch: 1, []),
        lambda: loop.loader([1, 2, 3]),
        lambda: loop.loader(Endless(), batch_size=2),
        lambda: loop.save("unused", 1, what=object()),
    ):
        with pytest.raises(UserError) as caught:
            mistake()
        codes.append(caught.value.code)
    loop.backward(mean(), num_samples=6, reduction="mean")
    assert float(loop.step().num_samples) == 6
    return codes


def test_mistakes_raise_a_code_in_a_loop_without_torchrun() -> None:
    (codes,) = run_ranks(1, codes_of_mistakes)
    assert codes == ["P040", "P040", "P041", "P044", "P048", "P048", "P049", "P049", "P047", "P047", "K033"]


def leave_micro_batches_early() -> list[str]:
    loop, codes = build(), []
    for rows in loop.micro_batches(torch.ones(8, 4), size=2):
        loop.backward(loop.model(rows).square().sum(), num_samples=2)
        break
    for rows in (loop.local_rows(torch.ones(8, 4), last=False),):
        loop.backward(loop.model(rows).square().sum(), num_samples=4)
        with pytest.raises(UserError) as caught:
            loop.step()
        codes.append(caught.value.code)
    return codes


def test_a_step_without_reduced_gradients_is_refused() -> None:
    assert run_ranks(2, leave_micro_batches_early) == [["P057"], ["P057"]]


def losses_counted_twice() -> int:
    loop = build()
    rows = loop.local_rows(torch.ones(4, 4))
    loop.backward(loop.model(rows).square().sum(), num_samples=2)
    with pytest.warns(UserWarning, match="add them and call backward once"):
        loop.backward(loop.model(rows).square().sum(), num_samples=2)
    return 0


def test_two_losses_of_the_same_rows_that_are_both_counted_are_warned_of() -> None:
    run_ranks(2, losses_counted_twice)

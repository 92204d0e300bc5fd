"""Several models, scalers and schedulers in a user's own loop, on ranks and after a restart."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran import Loop
from trimaran.core import UserError

SCHEDULERS = {
    "multistep": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
    "onecycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)],
        milestones=[2],
    ),
}


def build(sharding: str, *, scaler: torch.amp.GradScaler | None = None) -> tuple[Loop, Loop]:
    """Return the loops of an encoder and a decoder, which are trained together."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 6))
    first = trimaran.prepare(
        encoder, torch.optim.AdamW(encoder.parameters(), lr=0.05), sharding=sharding, scaler=scaler
    )
    return first, first.prepare(decoder, torch.optim.SGD(decoder.parameters(), lr=0.1, momentum=0.9), sharding=sharding)


def train_two_models(folder: Path, sharding: str, kind: str, until: int) -> list[Any]:
    """Return the first step, and losses and learning rates of each."""
    first, second = build(sharding)
    scheduler = SCHEDULERS[kind](second.optimizer)
    start = second.resume(folder, scheduler=scheduler)
    numbers: list[Any] = [start]
    for step in range(start, until):
        rows = first.local_rows(torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))
        for loop in (first, second):
            loop.optimizer.zero_grad()  # the other's backward went through this model too
            loss = (second.model(first.model(rows)) - rows).square().sum()
            loop.backward(loss, num_samples=len(rows))
            numbers.append(float(loop.step().loss))
        scheduler.step(*([numbers[-1]] if kind == "plateau" else []))
        numbers.append(second.optimizer.param_groups[0]["lr"])
    first.save(folder, until, scheduler=scheduler)
    return numbers


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("onecycle", "parameters"),
        *map(slow, [("multistep", "none"), ("plateau", "optimizer"), ("sequential", "none")]),
    ],
)
def test_two_models_and_a_scheduler_resume_exactly(kind: str, sharding: str, tmp_path: Path) -> None:
    whole = run_ranks(2, train_two_models, tmp_path / "whole", sharding, kind, 5)[0]
    before = run_ranks(2, train_two_models, tmp_path / "parts", sharding, kind, 3)[0]
    after = run_ranks(2, train_two_models, tmp_path / "parts", sharding, kind, 5)[0]
    assert (before[0], after[0]) == (0, 3)
    assert before[1:] + after[1:] == whole[1:]
    (alone,) = run_ranks(1, train_two_models, tmp_path / "alone", "none", kind, 5)
    assert alone == pytest.approx(whole, rel=1e-5)


def forget_the_scheduler(folder: Path) -> str:
    loop, _ = build("none")
    with pytest.raises(UserError) as caught:
        loop.resume(folder)
    return str(caught.value)


def test_a_scheduler_that_resume_is_not_given_is_asked_for(tmp_path: Path) -> None:
    run_ranks(1, train_two_models, tmp_path, "none", "multistep", 1)
    (message,) = run_ranks(1, forget_the_scheduler, tmp_path)
    assert message.startswith("K033: resume was not given scheduler")
    assert "loop.resume(folder, scheduler=scheduler)" in message


def train_with_overflow(sharding: str, overflow: bool) -> tuple[list[float], list[float]]:
    """Return weights after three steps, of which the second overflows on one rank, and the scales."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    loop, _ = build(sharding, scaler=scaler)
    for step in range(3):
        rows = loop.local_rows(torch.ones(4, 6) * (step + 1))
        if overflow and step == 1 and loop.rank == 1:
            rows[0, 0] = float("inf")
        loop.backward(loop.model(rows).square().sum(), num_samples=len(rows))
        loop.step(clip_norm=1.0)
        scales.append(scaler.get_scale())
    weights = loop.state_dict()
    return [float(each.double().sum()) for each in weights.values()], scales


@pytest.mark.parametrize("sharding", [slow("none"), "parameters"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(sharding: str) -> None:
    main, other = run_ranks(2, train_with_overflow, sharding, True)
    assert main[1] == other[1] == [1024.0, 512.0, 512.0]
    assert all(torch.isfinite(torch.tensor(main[0])))
    (clean, _) = run_ranks(2, train_with_overflow, sharding, False)
    assert clean[1] == [1024.0, 2048.0, 2048.0]
    assert clean[0] != main[0]

"""`loop.loader` deals every sample once, in an order that depends on neither the number of ranks nor a restart."""

import os
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, WeightedRandomSampler

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran import Loop
from trimaran.core import UserError

LENGTH, BATCH = 23, 5


class Noisy(Dataset):
    """Samples of their index, with noise of every global generator, as random crops have it."""

    def __init__(self, length: int = LENGTH, offset: int = 0) -> None:
        self.length, self.offset = length, offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return index + self.offset, torch.tensor(noise)


class Unseeded(Noisy):
    """Draws from a generator of its own, different in every process and at every load."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.from_numpy(np.random.default_rng().random(3))


class Buckets(Sampler):
    """A user's batch sampler: batches of different sizes, in random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(start, min(start + 3 + start % 2, LENGTH))) for start in range(0, LENGTH, 4)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return len(range(0, LENGTH, 4))


def data_loader(kind: str, batch: int = BATCH) -> DataLoader:
    dataset = Noisy()
    match kind:
        case "shuffled":
            return DataLoader(dataset, batch_size=batch, shuffle=True)
        case "workers":
            return DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=2, persistent_workers=True)
        case "drop_last":
            return DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True)
        case "generator":
            return DataLoader(dataset, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(4))
        case "weighted":
            return DataLoader(dataset, batch_size=batch, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
        case "buckets":
            return DataLoader(dataset, batch_sampler=Buckets())
    return DataLoader(dataset, batch_size=batch)


def build() -> tuple[Loop, nn.Module]:
    if not dist.is_initialized() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)), model


Dealt = list[list[tuple[int, list[float]]]]


def deal(kind: str, epochs: int, folder: Path | None = None, stop_after: int = 10**9) -> tuple[int, Dealt, int]:
    """Return the first epoch, this rank's samples of each batch, and the batches of an epoch. Save at the end."""
    loop, model = build()
    loader, dealt = loop.loader(data_loader(kind), seed=7), []
    step = loop.resume(folder, loader=loader) if folder is not None else 0
    first = loader.epoch
    torch.rand(loop.rank)  # ranks may draw differently for other purposes
    for _ in range(first, epochs):
        for indices, noise in loader:
            samples = list(zip(indices.tolist(), noise.tolist(), strict=True))
            dealt.append([] if loop.is_padding else samples)
            loop.backward(model(noise).sum(), num_samples=len(noise))
            loop.step()
            step += 1
            if folder is not None and len(dealt) == stop_after:
                loop.save(folder, step, loader=loader)
                return first, dealt, len(loader)
    return first, dealt, len(loader)


def joined(answers: list[tuple[int, Dealt, int]]) -> Dealt:
    """Return the global batches: the rows of all ranks, in rank order."""
    return [[*chain(*parts)] for parts in zip(*(dealt for _, dealt, _ in answers), strict=True)]


@pytest.mark.parametrize(
    "kind",
    ["shuffled", "workers", "buckets", *map(slow, ("drop_last", "generator", "weighted", "in order"))],
)
def test_ranks_together_see_what_one_process_sees(kind: str) -> None:
    (alone,) = run_ranks(1, deal, kind, 2)
    assert joined(run_ranks(3, deal, kind, 2)) == alone[1]
    per_epoch = alone[2]
    assert len(alone[1]) == 2 * per_epoch
    first, second = (
        [index for batch in part for index, _ in batch] for part in (alone[1][:per_epoch], alone[1][per_epoch:])
    )
    if kind in ("shuffled", "workers", "generator", "in order"):
        assert sorted(first) == sorted(second) == list(range(LENGTH))
    assert (first == second) == (kind == "in order")
    noises = [tuple(noise) for batch in alone[1] for _, noise in batch]
    assert len({*noises}) >= len(noises) - 2 * LENGTH * (kind == "weighted"), "a sample has new noise in each epoch"


def test_a_data_loader_with_a_generator_keeps_its_order() -> None:
    """A converted script then has the losses of the plain one."""
    source = data_loader("generator")
    plain = [indices.tolist() for _ in range(2) for indices, _ in source]
    batches = joined(run_ranks(2, deal, "generator", 2))
    assert [[index for index, _ in batch] for batch in batches] == plain


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("shuffled", (3, 4)),
        slow(("generator", (5, 2))),
        slow(("buckets", (7, 3))),
    ],
)
def test_another_number_of_ranks_resumes_within_an_epoch_exactly(
    kind: str, stops: tuple[int, int], tmp_path: Path
) -> None:
    (alone,) = run_ranks(1, deal, kind, 3)
    legs: Dealt = []
    for ranks, stop_after in zip((2, 3, 1), (*stops, 10**9), strict=True):
        legs += joined(run_ranks(ranks, deal, kind, 3, tmp_path, stop_after))
    assert legs == alone[1]


def resume_with_another_batch_size(kind: str, folder: Path, batch: int, stop_after: int) -> list[int]:
    loop, model = build()
    loader, seen = loop.loader(data_loader(kind, batch), seed=3), []
    loop.resume(folder, loader=loader)
    for number, (indices, noise) in enumerate(loader, start=1):
        seen += [] if loop.is_padding else indices.tolist()
        loop.backward(model(noise).sum(), num_samples=len(noise))
        loop.step()
        if number == stop_after:
            loop.save(folder, number, loader=loader)
            break
    return seen


@pytest.mark.parametrize("kind", ["shuffled", "generator"])
def test_every_sample_is_seen_once_if_the_batch_size_changes_within_an_epoch(kind: str, tmp_path: Path) -> None:
    before = run_ranks(2, resume_with_another_batch_size, kind, tmp_path, 5, 3)
    after = run_ranks(1, resume_with_another_batch_size, kind, tmp_path, 7, 99)
    assert sorted(chain(*before, *after)) == list(range(LENGTH))
    assert len([*chain(*before)]) == 15


def read_different_datasets(kind: str) -> str:
    loop, _ = build()
    rank = loop.rank
    datasets = {
        "length": Noisy(LENGTH + rank),
        "order": Noisy(offset=rank),
        "unseeded": Unseeded(),
        "same": Noisy(),
        "sampler": Noisy(),
    }
    sampler = DistributedSampler(datasets[kind]) if kind == "sampler" else None
    try:
        loop.loader(DataLoader(datasets[kind], batch_size=4, sampler=sampler))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("length", "P045: ranks read different datasets: rank 0 has 23 samples; rank 1 has 24 samples"),
        ("order", "P045: ranks read different datasets: samples [0, 22] of rank(s) 1 are not those of rank 0"),
        ("sampler", "P047: loop.loader cannot deal this data: the DataLoader has a DistributedSampler"),
        ("unseeded", ""),
        ("same", ""),
    ],
)
def test_different_datasets_are_refused_and_random_ones_are_not(kind: str, message: str) -> None:
    for answer in run_ranks(2, read_different_datasets, kind):
        assert answer.startswith(message)
        assert bool(answer) == bool(message)


def peek_and_accumulate() -> list[Any]:
    """Return positions after a look at the first batch, and the rows of micro-batches of a loader's batch."""
    loop, model = build()
    loader = loop.loader(Noisy(), batch_size=9, shuffle=False)
    first = len(next(iter(loader))[0])
    epoch, sizes, counts = loader.epoch, [], []
    for batch in loader:
        for indices, noise in loop.micro_batches(batch, size=2):
            sizes.append(0 if loop.is_padding else len(indices))
            loop.backward(model(noise).sum(), num_samples=len(noise))
        counts.append(float(loop.step().num_samples))
    return [first, epoch, loader.epoch, sizes, counts]


def test_a_batch_of_a_loader_is_split_into_equally_many_micro_batches_on_all_ranks() -> None:
    main, other = run_ranks(2, peek_and_accumulate)
    assert main == [5, 0, 2, [2, 2, 1, 2, 2, 1, 2, 1], [9, 9, 5]]
    assert other == [4, 0, 2, [2, 2, 0, 2, 2, 0, 2, 0], [9, 9, 5]]

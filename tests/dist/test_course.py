"""Compression, local steps and stale gradients change the course of training only within a stated bound."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.course import LEARNED, METHODS, SEEDS, SYNCHRONOUS, Method, held_out_loss
from tests.parity import train_run


def train(method: Method, seeds: Sequence[int] = SEEDS, **settings: Any) -> list[float]:
    """Return the held-out losses of all seeds."""
    with TemporaryDirectory() as folder:
        runs = [train_run(method.recipe(seed, **settings), method.plan(), Path(folder)) for seed in seeds]
        return [held_out_loss(run) for run in runs]


@cache
def train_synchronously(task: str) -> list[float]:
    return train(SYNCHRONOUS[task])


def test_a_short_run_with_compression_is_within_its_bound() -> None:
    method = METHODS["int8"]
    ours, exact = (train(each, seeds=(0,), steps=40) for each in (method, SYNCHRONOUS[method.task]))
    assert ours != exact
    assert ours[0] <= method.limit(exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_held_out_loss_is_within_its_bound(name: str) -> None:
    method = METHODS[name]
    ours, exact = train(method), train_synchronously(method.task)
    print(name, [round(each, 4) for each in ours], "synchronous", [round(each, 4) for each in exact])
    assert max(exact) < LEARNED, "it has learned something"
    assert mean(ours) <= method.limit(exact), (ours, exact)

"""Compression, local steps and stale gradients change the course of training only within a stated bound."""

from functools import cache
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp

import pytest

from tests.course import LEARNED, METHODS, SEEDS, SYNCHRONOUS, Method, held_out_loss
from tests.parity import train_run


def train(method: Method) -> list[float]:
    """Return the held-out losses of all seeds."""
    folder = Path(mkdtemp(prefix="course-")) / "runs"
    folder.mkdir()
    return [held_out_loss(train_run(method.recipe(seed), method.plan(), folder)) for seed in SEEDS]


@cache
def train_synchronously(task: str) -> list[float]:
    return train(SYNCHRONOUS[task])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_held_out_loss_is_within_its_bound(name: str) -> None:
    method = METHODS[name]
    ours, exact = train(method), train_synchronously(method.task)
    print(name, [round(each, 4) for each in ours], "synchronous", [round(each, 4) for each in exact])
    assert max(exact) < LEARNED, "it has learned something"
    assert mean(ours) <= method.limit(exact), (ours, exact)

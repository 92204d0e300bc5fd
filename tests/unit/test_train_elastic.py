"""Elastic replicas: a rank's place, where they are refused, and the metrics of several replicas in one line."""

import math
from typing import Any

import pytest
import torch

from tests.parity import plan_for
from trimaran.core import Recipe, StepMetrics, UserError
from trimaran.train import RankInfo, Replica, SupervisorLink, check_replica, merge_lines, run_until


def line(step: int, loss: float, tokens: int = 100) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, grad_norm=1.0, lr=0.1, tokens=tokens, samples=4, step_seconds=1.0, mfu=0.4,
                       peak_bytes=1, phases={}, time=0.0)  # fmt: skip


def test_a_line_has_the_loss_and_the_tokens_of_all_replicas() -> None:
    lines = {0: [[1, 2.0, 100, 4], [2, 3.0, 100, 4]], 2: [[1, 4.0, 300, 4], [2, math.nan, 300, 4]]}
    first, second = merge_lines([line(1, 2.0), line(2, 3.0)], lines, num_replicas=2)
    assert first.loss == pytest.approx((2.0 * 100 + 4.0 * 300) / 400)
    assert (first.tokens, first.samples, first.mfu) == (400, 8, 0.2)
    assert math.isnan(second.loss)


def test_a_rank_counts_in_its_replica() -> None:
    replica = Replica(number=1, num=3, size=4)
    of_run = RankInfo(rank=6, world_size=12, local_rank=6, device=torch.device("cpu"), local_world_size=12)
    info = replica.rank_info(of_run)
    assert (info.rank, info.world_size, info.local_rank) == (2, 4, 2)
    plan = plan_for(Recipe(), grad_accum=1, dp_replicate=2, dp_shard=2)
    assert replica.plan(plan).mesh.world_size == 2
    assert replica.plan(plan).global_batch * 2 == plan.global_batch


@pytest.mark.parametrize(
    ("link", "data", "what"),
    [
        ({}, {}, "supervisor"),
        ({"store": "here:1", "own_disk": "a"}, {}, "share"),
        ({"store": "here:1"}, {"epochs": 2}, "data.epochs"),
    ],
)
def test_elastic_replicas_are_refused_where_they_cannot_work(
    link: dict[str, Any], data: dict[str, Any], what: str
) -> None:
    recipe = Recipe.model_validate({"data": data})
    with pytest.raises(UserError, match=what) as caught:
        check_replica(recipe, SupervisorLink(**link))
    assert caught.value.code == "P003"
    check_replica(Recipe(), SupervisorLink(store="here:1"))


def test_an_exchange_that_fails_or_is_not_needed_any_more_has_no_result() -> None:
    def fail() -> int:
        raise RuntimeError("a planted fault")

    assert run_until(lambda: 3, lambda: False) == 3
    assert run_until(fail, lambda: False) is None
    never = torch.multiprocessing.get_context("fork").Event()
    assert run_until(lambda: never.wait(60), lambda: True) is None
    never.set()

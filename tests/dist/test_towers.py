"""Towers that are frozen, or have their own learning rate, sharding or recompute mode."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.cases import slow
from tests.ranks import run_ranks
from tests.vlm_training import SPEC, TRAIN, TrainingTrace, assert_traces_match, plan_of, train_all_ranks, train_rank
from trimaran.core import Plan

SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 2}, "sharding": "parameters"}
ZERO_BUBBLE: dict[str, Any] = {
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "zero-bubble", "stages": [1, 1, 1, 2]},
    "grad_accum": 4,
}
RATES = {"vision": {"lr": 1e-4, "weight_decay": 0.0}, "language": {"lr": 1e-2}}


@cache
def single_process(freeze: tuple[str, ...] = (), *, rates: bool = False) -> TrainingTrace:
    return train_all_ranks(SPEC, plan_of(grad_accum=1), with_rates() if rates else TRAIN, freeze)[0]


def with_rates() -> dict[str, Any]:
    return TRAIN | {"optimizer": TRAIN["optimizer"] | {"towers": RATES}}


@pytest.mark.parametrize(
    ("freeze", "plan"),
    [
        (("vision",), {"mesh": {"dp_replicate": 2}}),
        (("vision",), SHARDED),
        (("vision",), {"mesh": {"tp": 2}, "towers": {"vision": {"tp": 1}}}),
        slow((("vision",), {"mesh": {"tp": 2}, "towers": {"vision": {"tp": 1, "sharding": "parameters"}}})),
        slow((("vision",), {"mesh": {"pp": 2}, "pipeline": {"stages": [1, 4]}})),  # below, with three stages
        slow((("vision",), {"mesh": {"pp": 2}, "pipeline": {"stages": [2, 3]}})),
        (("vision",), ZERO_BUBBLE),
        slow((("language",), ZERO_BUBBLE)),
        slow((("language",), {"mesh": {"tp": 2}})),
        (("vision", "language"), {"mesh": {"pp": 3}, "pipeline": {"stages": [2, 1, 2]}, "grad_accum": 4}),
    ],
)
def test_a_frozen_tower_does_not_change_under_any_axis(freeze: tuple[str, ...], plan: dict[str, Any]) -> None:
    reference, moving = single_process(freeze), single_process()
    assert_traces_match(train_all_ranks(SPEC, plan_of(**plan), TRAIN, freeze), reference)
    for tower in freeze:
        assert all(norms[tower] == 0 for norms in reference.towers)
        names = [name for name in reference.weights if name.startswith(f"{tower}.") and name.endswith("proj.weight")]
        assert not any(np.array_equal(reference.weights[name], moving.weights[name]) for name in names)


@pytest.mark.parametrize("plan", [SHARDED, {"mesh": {"pp": 2}, "pipeline": {"stages": [1, 4]}}])
def test_towers_have_their_own_learning_rates_under_every_plan(plan: dict[str, Any]) -> None:
    reference = single_process(rates=True)
    assert_traces_match(train_all_ranks(SPEC, plan_of(**plan), with_rates()), reference)
    name = "vision.layers.0.mlp.up_proj.weight"
    first = initial_weights()[name]
    slow, quick = (np.abs(each.weights[name] - first).mean() for each in (reference, single_process()))
    assert slow < 0.1 * quick


@cache
def initial_weights() -> dict[str, np.ndarray]:
    """Return the initial weights, which a frozen tower keeps."""
    return single_process(("vision",)).weights


@pytest.mark.parametrize(
    "plan",
    [
        SHARDED | {"towers": {"vision": {"sharding": "none"}, "projector": {"sharding": "optimizer"}}},
        SHARDED | {"towers": {"language": {"sharding": "gradients"}}, "grad_accum": 4},
        slow(SHARDED | {"towers": {"language": {"sharding": "none"}}, "grad_accum": 4}),
        SHARDED | {"towers": {"vision": {"recompute": "full"}, "language": {"recompute": "selective"}}},
    ],
)
def test_towers_have_their_own_sharding_and_recompute_mode(plan: dict[str, Any]) -> None:
    assert_traces_match(train_all_ranks(SPEC, plan_of(**plan)), single_process())


def test_the_tower_norms_combine_to_the_global_norm() -> None:
    for norm, towers in zip(single_process().norms, single_process().towers, strict=True):
        assert norm == pytest.approx(sum(each**2 for each in towers.values()) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_deepspeed_freezes_towers_and_applies_their_learning_rates(sharding: str) -> None:
    plan = plan_of(engine="deepspeed", mesh={"dp_shard": 2}, sharding=sharding)
    reference = train_all_ranks(SPEC, plan_of(grad_accum=1), with_rates(), ("projector",))[0]
    for losses, norms in run_ranks(2, numbers_of, plan):
        np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
        np.testing.assert_allclose(norms, reference.norms, rtol=1e-5)


def numbers_of(plan: Plan) -> tuple[list[float], list[float]]:
    trajectory = train_rank(SPEC, plan, with_rates(), ("projector",))
    return trajectory.losses, trajectory.norms

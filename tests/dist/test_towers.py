"""Towers that are frozen, or have their own learning rate, sharding or recompute mode."""

from typing import Any

import numpy as np
import pytest

from tests.cases import slow
from tests.ranks import run_ranks
from tests.vlm_training import (
    SPEC,
    TRAIN,
    Case,
    assert_each_trains_as_one_process,
    plan_of,
    train_all_ranks,
    train_in_turn,
    train_rank,
)
from trimaran.core import Plan

SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 2}, "sharding": "parameters"}
ZERO_BUBBLE: dict[str, Any] = {
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "zero-bubble", "stages": [1, 1, 1, 2]},
    "grad_accum": 4,
}
RATES = {"vision": {"lr": 1e-4, "weight_decay": 0.0}, "language": {"lr": 1e-2}}


def with_rates() -> dict[str, Any]:
    return TRAIN | {"optimizer": TRAIN["optimizer"] | {"towers": RATES}}


def frozen(freeze: tuple[str, ...], **fields: Any) -> Case:
    return Case(SPEC, plan_of(**fields), freeze=freeze)


QUICK = {
    "frozen vision, sharded": frozen(("vision",), **SHARDED),
    "frozen vision, tp beside it": frozen(("vision",), mesh={"tp": 2}, towers={"vision": {"tp": 1}}),
    "frozen vision, zero-bubble": frozen(("vision",), **ZERO_BUBBLE),
    "a stage that only passes gradients on": frozen(
        ("vision", "language"), mesh={"pp": 2}, pipeline={"stages": [3, 2]}, grad_accum=4
    ),
    "own rates, sharded": Case(SPEC, plan_of(**SHARDED), with_rates()),
    "own rates, pp": Case(SPEC, plan_of(mesh={"pp": 2}, pipeline={"stages": [1, 4]}), with_rates()),
    "two towers sharded less": Case(
        SPEC, plan_of(**SHARDED, towers={"vision": {"sharding": "none"}, "projector": {"sharding": "optimizer"}})
    ),
    "language in zero-2": Case(SPEC, plan_of(**SHARDED, towers={"language": {"sharding": "gradients"}}, grad_accum=4)),
    "own recompute modes": Case(
        SPEC, plan_of(**SHARDED, towers={"vision": {"recompute": "full"}, "language": {"recompute": "selective"}})
    ),
}
SLOW = {
    "frozen vision, replicated": frozen(("vision",), mesh={"dp_replicate": 2}),
    "frozen vision, sharded over tp": frozen(
        ("vision",), mesh={"tp": 2}, towers={"vision": {"tp": 1, "sharding": "parameters"}}
    ),
    "frozen vision, pp inside it": frozen(("vision",), mesh={"pp": 2}, pipeline={"stages": [1, 4]}),
    "frozen vision, pp after it": frozen(("vision",), mesh={"pp": 2}, pipeline={"stages": [2, 3]}),
    "frozen language, zero-bubble": frozen(("language",), **ZERO_BUBBLE),
    "frozen language, tp": frozen(("language",), mesh={"tp": 2}),
    "language not sharded": Case(SPEC, plan_of(**SHARDED, towers={"language": {"sharding": "none"}}, grad_accum=4)),
}
THREE_RANKS = {
    "frozen vision and language": frozen(
        ("vision", "language"), mesh={"pp": 3}, pipeline={"stages": [2, 1, 2]}, grad_accum=4
    )
}


@pytest.mark.parametrize("cases", [QUICK, slow(SLOW), slow(THREE_RANKS)], ids=["quick", "slow", "3 ranks"])
def test_towers_with_their_own_settings_train_as_in_one_process(cases: dict[str, Case]) -> None:
    assert_each_trains_as_one_process(cases)


def test_frozen_towers_do_not_move_and_towers_have_their_own_rates_and_norms() -> None:
    plan = plan_of(grad_accum=1)
    cases = [Case(SPEC, plan), Case(SPEC, plan, freeze=("vision", "language")), Case(SPEC, plan, with_rates())]
    moving, frozen, with_own_rates = (traces[0] for traces in train_in_turn(cases))
    for norm, towers in zip(moving.norms, moving.towers, strict=True):
        assert norm == pytest.approx(sum(each**2 for each in towers.values()) ** 0.5)
    for tower in ("vision", "language"):
        assert all(norms[tower] == 0 for norms in frozen.towers)
        names = [name for name in frozen.weights if name.startswith(f"{tower}.") and name.endswith("proj.weight")]
        assert not any(np.array_equal(frozen.weights[name], moving.weights[name]) for name in names)
    name = "vision.layers.0.mlp.up_proj.weight"  # which are the first weights where it is frozen
    slower, quicker = (np.abs(each.weights[name] - frozen.weights[name]).mean() for each in (with_own_rates, moving))
    assert 0 < slower < 0.1 * quicker


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

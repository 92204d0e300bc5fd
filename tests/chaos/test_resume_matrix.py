"""Every axis and every product of axes: loads what one process kept, and one process loads what it kept."""

from functools import lru_cache
from pathlib import Path

import pytest

from tests.matrix import GLOBAL_BATCH, Case, cases, recipe_for
from tests.parity import TOLERANCE
from tests.resume import Leg, sail_leg
from trimaran.core import Plan, Recipe

pytestmark = pytest.mark.chaos

LEG = 2
ALONE = Plan(micro_batch=GLOBAL_BATCH)


def recipe_of(model: str) -> Recipe:
    return recipe_for(model, Path("unused.jsonl"))  # the batches are made from the step, see `tests.resume`


@lru_cache
def reference(model: str) -> Leg:
    """Return six steps of one process, with what it kept after three."""
    return sail_leg(recipe_of(model), ALONE, steps=2 * LEG + 2)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_plan_takes_over_and_hands_back(case: Case) -> None:
    recipe, whole = recipe_of(case.model), reference(case.model)
    begun = whole.midway
    there = sail_leg(recipe, case.plan, steps=LEG, after=begun)
    there.assert_loaded(begun)
    back = sail_leg(recipe, ALONE, steps=1, after=there.kept)
    back.assert_loaded(there.kept)
    assert there.losses + back.losses == pytest.approx(whole.losses[begun.step :], rel=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in cases() if case.plan.mesh.world_size <= 2], ids=str)
def test_a_break_leaves_no_trace(case: Case) -> None:
    recipe = recipe_of(case.model)
    whole = sail_leg(recipe, case.plan, steps=2 * LEG)
    again = sail_leg(recipe, case.plan, steps=LEG, after=whole.midway)
    again.assert_loaded(whole.midway)
    assert again.losses == whole.losses[LEG:]
    again.assert_same_end(Leg(again.losses, again.loaded, again.midway, whole.kept))

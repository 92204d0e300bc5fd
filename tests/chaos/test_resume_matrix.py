"""Every axis and every combination of axes resumes from the state of one process, and one process from theirs."""

from functools import lru_cache
from pathlib import Path

import pytest

from tests.matrix import GLOBAL_BATCH, Case, cases, recipe_for
from tests.parity import TOLERANCE
from tests.resume import TrainedSegment, train_segment
from trimaran.core import Plan, Recipe

pytestmark = pytest.mark.slow

SEGMENT_STEPS = 2
ALONE = Plan(micro_batch=GLOBAL_BATCH)


def recipe_of(model: str) -> Recipe:
    return recipe_for(model, Path("unused.jsonl"))  # the batches are made from the step, see `tests.resume`


@lru_cache
def reference(model: str) -> TrainedSegment:
    """Return six steps of one process, with its state after three."""
    return train_segment(recipe_of(model), ALONE, steps=2 * SEGMENT_STEPS + 2)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_plan_resumes_from_one_process_and_one_process_from_it(case: Case) -> None:
    recipe, full = recipe_of(case.model), reference(case.model)
    start = full.midway
    under_plan = train_segment(recipe, case.plan, steps=SEGMENT_STEPS, after=start)
    under_plan.assert_loaded(start)
    alone_again = train_segment(recipe, ALONE, steps=1, after=under_plan.saved)
    alone_again.assert_loaded(under_plan.saved)
    assert under_plan.losses + alone_again.losses == pytest.approx(full.losses[start.step :], rel=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in cases() if case.plan.mesh.world_size <= 2], ids=str)
def test_a_resume_is_exact(case: Case) -> None:
    recipe = recipe_of(case.model)
    full = train_segment(recipe, case.plan, steps=2 * SEGMENT_STEPS)
    again = train_segment(recipe, case.plan, steps=SEGMENT_STEPS, after=full.midway)
    again.assert_loaded(full.midway)
    assert again.losses == full.losses[SEGMENT_STEPS:]
    again.assert_same_end(TrainedSegment(again.losses, again.loaded, again.midway, full.saved))

"""When the state that training starts from is copied to memory, for all pairs of facts."""

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest

from trimaran.train import CopyTime, StartFacts, when_to_copy

Tier = Literal["memory", "disk", "store"] | None
# A fresh run whose memory is being allocated, with copies after each step.
START = StartFacts(
    keeps_copies=True,
    has_memory=None,
    is_copied=False,
    tier=None,
    is_change=False,
    rewinds=False,
    every_step=True,
)
TIERS: tuple[Tier, ...] = ("memory", "disk", "store", None)
ALL = [
    StartFacts(
        keeps_copies=keeps,
        has_memory=memory,
        is_copied=copied,
        tier=tier,
        is_change=change,
        rewinds=rewinds,
        every_step=every,
    )
    for keeps, memory, copied, tier, change, rewinds, every in product(
        (True, False),
        (True, False, None),
        (True, False),
        TIERS,
        (True, False),
        (True, False),
        (True, False),
    )
]


def test_nothing_is_copied_without_memory_for_it_or_if_all_ranks_hold_a_copy() -> None:
    for facts in ALL:
        is_needless = facts.is_copied or not facts.keeps_copies or facts.has_memory is False
        assert (when_to_copy(facts) is CopyTime.NEVER) == is_needless


def test_memory_that_is_there_is_used_before_the_first_step() -> None:
    for facts in ALL:
        if facts.keeps_copies and facts.has_memory and not facts.is_copied:
            assert when_to_copy(facts) is CopyTime.NOW


def test_training_waits_for_memory_only_if_the_state_could_not_be_restored_again() -> None:
    assert when_to_copy(START) is CopyTime.LATER
    assert when_to_copy(replace(START, tier="disk")) is CopyTime.LATER
    assert when_to_copy(replace(START, tier="memory")) is CopyTime.NOW


@pytest.mark.parametrize("tier", [None, "disk", "store"])
def test_a_run_that_rewinds_at_a_nan_needs_a_copy_from_the_first_step_on(tier: Tier) -> None:
    assert when_to_copy(replace(START, tier=tier, rewinds=True)) is CopyTime.NOW


@pytest.mark.parametrize("tier", [None, "store"])
def test_with_steps_between_copies_the_first_step_needs_one_to_rewind_to(tier: Tier) -> None:
    assert when_to_copy(replace(START, tier=tier, every_step=False)) is CopyTime.NOW
    assert when_to_copy(replace(START, tier="disk", every_step=False)) is CopyTime.LATER


def test_after_a_change_of_the_plan_training_never_waits_for_memory() -> None:
    for facts in ALL:
        if facts.is_change and facts.has_memory is None:
            assert when_to_copy(facts) is not CopyTime.NOW

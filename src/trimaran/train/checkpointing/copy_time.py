"""When to copy the restored state to memory, so that a kill right after the start loses nothing."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class CopyTime(Enum):
    """When a state is copied: before the first step, after a step as soon as there is memory for it, or not at all."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What is known as training starts from a state, the same on all ranks.

    `has_memory`: whether there is memory for copies; None while it is being allocated. `is_copied`: all ranks hold a
    copy of this state. `tier` is where the state was restored from, `is_change` whether another plan held it before.
    `rewinds`: a NaN rewinds the run. `every_step`: each step is copied, or as many as cost little.
    """

    keeps_copies: bool
    has_memory: bool | None
    is_copied: bool
    tier: Literal["memory", "disk", "store"] | None
    is_change: bool
    rewinds: bool
    every_step: bool


def when_to_copy(facts: StartFacts) -> CopyTime:
    """Return when to copy the state that training starts from."""
    if not facts.keeps_copies or facts.is_copied or facts.has_memory is False:
        return CopyTime.NEVER
    if facts.has_memory:
        return CopyTime.NOW
    if facts.is_change:  # training does not wait for memory that is still being allocated
        return CopyTime.LATER
    if facts.tier == "memory" or facts.rewinds:
        return CopyTime.NOW
    # The state can be restored again. But if replicas differ, the run rewinds to this copy while there is no other.
    return CopyTime.LATER if facts.tier == "disk" or facts.every_step else CopyTime.NOW

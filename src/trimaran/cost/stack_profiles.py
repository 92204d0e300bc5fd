"""Whose profile a prediction assumes: the software that will run the plan."""

from dataclasses import dataclass

from trimaran.core import UserError, nearest
from trimaran.cost.memory_profiles import MEMORY_PROFILES, MemoryProfile
from trimaran.cost.time_profiles import TIME_PROFILES, TimeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training system: what it keeps in memory, and how it spends its time."""

    name: str
    memory: MemoryProfile
    time: TimeProfile


STACKS = {name: Stack(name=name, memory=MEMORY_PROFILES[name], time=TIME_PROFILES[name]) for name in MEMORY_PROFILES}


def find_stack(name: str) -> Stack:
    """Return the stack that `name` means."""
    if name not in STACKS:
        raise UserError("P050", f"there is no stack '{name}'{nearest(name, STACKS)}", where="stack",
                        fix=f"use one of {', '.join(STACKS)}")  # fmt: skip
    return STACKS[name]

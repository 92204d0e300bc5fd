"""The training systems whose behaviour the cost model knows."""

from dataclasses import dataclass

from trimaran.core import UserError, did_you_mean
from trimaran.cost.memory_profiles import MEMORY_PROFILES, MemoryProfile
from trimaran.cost.time_profiles import TIME_PROFILES, TimeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training system: the constants of its memory and of its step time."""

    name: str
    memory: MemoryProfile
    time: TimeProfile


STACKS = {name: Stack(name=name, memory=MEMORY_PROFILES[name], time=TIME_PROFILES[name]) for name in MEMORY_PROFILES}


def find_stack(name: str) -> Stack:
    """Return the stack called `name`."""
    if name not in STACKS:
        raise UserError("P050", f"there is no stack '{name}'{did_you_mean(name, STACKS)}", where="stack",
                        fix=f"use one of {', '.join(STACKS)}")  # fmt: skip
    return STACKS[name]

"""The training systems whose behaviour the cost model knows."""

from dataclasses import dataclass, replace

from trimaran.core import UserError, did_you_mean
from trimaran.cost.memory_profiles import MEMORY_PROFILES, MemoryProfile
from trimaran.cost.time_profiles import HF_HOST, TIME_PROFILES, TimeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training system: the constants of its memory and of its step time.

    joins_projections: projections of the same input are one matmul, if `Plan.joins_projections`.
    """

    name: str
    memory: MemoryProfile
    time: TimeProfile
    joins_projections: bool = False


STACKS = {name: Stack(name=name, memory=MEMORY_PROFILES[name], time=TIME_PROFILES[name]) for name in MEMORY_PROFILES}
STACKS["trimaran"] = replace(STACKS["trimaran"], joins_projections=True)

# Our trainer with the blocks of a Hugging Face model, whose own code launches the kernels of a layer.
HF_MODELS = replace(
    STACKS["trimaran"],
    time=replace(STACKS["trimaran"].time, host=HF_HOST),
    joins_projections=False,
)


def find_stack(name: str) -> Stack:
    """Return the stack called `name`."""
    if name not in STACKS:
        raise UserError("P050", f"there is no stack '{name}'{did_you_mean(name, STACKS)}", where="stack",
                        fix=f"use one of {', '.join(STACKS)}")  # fmt: skip
    return STACKS[name]

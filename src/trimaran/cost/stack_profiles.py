"""The training systems whose behaviour the cost model knows."""

from dataclasses import dataclass, replace
from functools import lru_cache

from trimaran.core import UserError, did_you_mean
from trimaran.cost.memory_profiles import MEMORY_PROFILES, MemoryProfile
from trimaran.cost.time_profiles import HF_HOST, TIME_PROFILES, TimeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training system: the constants of its memory and of its step time.

    joins_projections: projections of the same input are one matmul, if `Plan.joins_projections`.
    joins_blocks: small blocks share FSDP units (`core/fsdp_units.py`).
    default_sharding: what its data ranks shard unless a log says so.
    gathers_fp8: an fp8 plan gathers sharded weights of the layers in one byte (torchao's FSDP all-gather).
    """

    name: str
    memory: MemoryProfile
    time: TimeProfile
    joins_projections: bool = False
    joins_blocks: bool = False
    default_sharding: str = "none"
    gathers_fp8: bool = False


STACKS = {name: Stack(name=name, memory=MEMORY_PROFILES[name], time=TIME_PROFILES[name]) for name in MEMORY_PROFILES}
STACKS["trimaran"] = replace(STACKS["trimaran"], joins_projections=True, joins_blocks=True)
STACKS["torchtitan"] = replace(STACKS["torchtitan"], gathers_fp8=True)
STACKS["megatron"] = replace(STACKS["megatron"], default_sharding="optimizer")  # its distributed optimizer

# Our trainer with the blocks of a Hugging Face model, whose own code launches the kernels of a layer.
HF_MODELS = replace(
    STACKS["trimaran"],
    time=replace(STACKS["trimaran"].time, host=HF_HOST),
    joins_projections=False,
    joins_blocks=False,
)


@lru_cache(maxsize=len(STACKS))
def without_sequence_parallelism(stack: Stack) -> Stack:
    """Return the stack with tensor parallelism alone: every rank holds and normalises the whole residual stream."""
    saved = {key: replace(each, tp_splits="nothing") for key, each in stack.memory.saved.items()}
    comm = stack.time.comm._replace(splits_sequence=False)
    return replace(stack, memory=replace(stack.memory, saved=saved), time=replace(stack.time, comm=comm))


@lru_cache(maxsize=2 * len(STACKS))
def with_16_bit_gradients(stack: Stack) -> Stack:
    """Return the stack with gradients that are held, added up and reduced in 16 bits."""
    sent = stack.time.parameter_bytes._replace(gradient=2)
    return replace(
        stack, memory=replace(stack.memory, gradient_bytes=2), time=replace(stack.time, parameter_bytes=sent)
    )


def find_stack(name: str) -> Stack:
    """Return the stack called `name`."""
    if name not in STACKS:
        raise UserError("P050", f"there is no stack '{name}'{did_you_mean(name, STACKS)}", where="stack",
                        fix=f"use one of {', '.join(STACKS)}")  # fmt: skip
    return STACKS[name]

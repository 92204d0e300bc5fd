"""The cost model: memory and step time of a plan, one pure function per term. Imports no torch."""

from trimaran.cost.job import STATE_BYTES, Job
from trimaran.cost.mixed_devices import predict
from trimaran.cost.stack_profiles import (
    HF_MODELS,
    STACKS,
    Stack,
    find_stack,
    with_16_bit_gradients,
    without_sequence_parallelism,
)

__all__ = [
    "HF_MODELS",
    "STACKS",
    "STATE_BYTES",
    "Job",
    "Stack",
    "find_stack",
    "predict",
    "with_16_bit_gradients",
    "without_sequence_parallelism",
]

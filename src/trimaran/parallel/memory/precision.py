"""Which arithmetic a plan computes in."""

from contextlib import AbstractContextManager, nullcontext

import torch

from trimaran.core import Plan


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Return the context that forward runs in. Weights, gradients and optimizer states are fp32 in every plan."""
    if plan.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()

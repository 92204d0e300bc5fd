"""Random weights without neutral values."""

import torch
from torch import nn


def perturb(module: nn.Module) -> None:
    """Add noise to every parameter, so that no neutral value hides a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))

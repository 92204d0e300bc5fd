"""The dtype that a recipe's `train.precision` gives a module instead of the plan's."""

import torch
from torch import nn

DTYPE_ATTRIBUTE = "_own_dtype"


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the recipe gave this module; None if it has the plan's."""
    return getattr(module, DTYPE_ATTRIBUTE, None)

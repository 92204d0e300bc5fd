"""The arithmetic that a recipe may give a module of its own, whatever the plan's."""

import torch
from torch import nn

MARK = "_own_dtype"


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the arithmetic that the recipe gave this module; None where it is the plan's."""
    return getattr(module, MARK, None)

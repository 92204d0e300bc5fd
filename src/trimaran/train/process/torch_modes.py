"""The modes of torch in the process of a rank."""

import torch

from trimaran.core import Recipe
from trimaran.train.process.allocator_settings import set_expandable_segments


def set_torch_modes(recipe: Recipe, device: torch.device) -> None:
    """Set torch's modes, and those of the allocator of the device, as the recipe says.

    With anomaly mode an error in backward names the line of the forward. NaN is left to the guard.
    """
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(recipe.faults.debug, check_nan=False)
    set_expandable_segments(recipe.faults.expandable_segments, device)

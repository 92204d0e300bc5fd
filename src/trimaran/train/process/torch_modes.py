"""The modes of torch in the process of a rank, and the settings of its CUDA allocator."""

import logging
from functools import cache
from typing import Any, Literal

import torch

from trimaran.core import Recipe
from trimaran.core.traits import DEVICE_TRAITS

log = logging.getLogger(__name__)


def set_expandable_segments(wanted: Literal["auto"] | bool, device: torch.device) -> None:
    """Let the allocator of a GPU grow its segments in place from now on, or not; `auto` is as at the start.

    torch reads this setting whenever it reserves memory. Segments that hold live tensors stay as they are; those that
    are free are given back, so that they are reserved anew. Does nothing on a CPU.
    """
    if not DEVICE_TRAITS[device.type].has_own_memory:
        return
    at_start = _at_start()
    value = at_start if wanted == "auto" else wanted
    if value == _uses_expandable_segments():
        return
    change: Any = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    )
    change(f"expandable_segments:{value}")  # the first is the newer one; both are private in torch
    torch.cuda.empty_cache()
    log.info("expandable segments: %s", value)


@cache
def _at_start() -> bool:
    """Return the setting that the process was started with. The first call must be before any change."""
    return _uses_expandable_segments()


def _uses_expandable_segments() -> bool:
    """Return the setting in use. Only snapshots have it in every version of torch that we support."""
    snapshot: Any = torch.cuda.memory._snapshot()
    return bool(snapshot["allocator_settings"]["expandable_segments"])


def set_torch_modes(recipe: Recipe, device: torch.device) -> None:
    """Set torch's modes, and those of the allocator of the device, as the recipe says.

    With anomaly mode an error in backward names the line of the forward. NaN is left to the guard.
    """
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(recipe.faults.debug, check_nan=False)
    set_expandable_segments(recipe.faults.expandable_segments, device)

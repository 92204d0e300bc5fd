"""Settings of the CUDA allocator that can change in a running process."""

import logging
from functools import cache
from typing import Any, Literal

import torch

log = logging.getLogger(__name__)


def set_expandable_segments(wanted: Literal["auto"] | bool, device: torch.device) -> None:
    """Let the allocator of a GPU grow its segments in place from now on, or not; `auto` is as at the start.

    torch reads this setting whenever it reserves memory. Segments that hold live tensors stay as they are; those that
    are free are given back, so that they are reserved anew. Does nothing on a CPU.
    """
    if device.type != "cuda":
        return
    at_start = _at_start()
    value = at_start if wanted == "auto" else wanted
    if value == _uses_expandable_segments():
        return
    private: Any = torch._C
    private._accelerator_setAllocatorSettings(f"expandable_segments:{value}")
    torch.cuda.empty_cache()
    log.info("expandable segments: %s", value)


@cache
def _at_start() -> bool:
    """Return the setting that the process was started with. The first call must be before any change."""
    return _uses_expandable_segments()


def _uses_expandable_segments() -> bool:
    private: Any = torch._C
    settings = str(private._accelerator_getAllocatorSettings()).replace(" ", "").lower()
    return "expandable_segments:true" in settings

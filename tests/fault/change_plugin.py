"""Rank 1 runs out of memory in the first step under a new plan, in the first attempt. See `plugin` for the import."""

import os
from typing import Any

import torch

from tests.fault import plugin  # noqa: F401 - the pause of every step
from trimaran.train.features.live_change import apply_change, rebuild

build_empty_networks = rebuild.build_empty_networks


def build_too_large(*args: Any) -> Any:
    networks = build_empty_networks(*args)
    networks[0].module.register_forward_pre_hook(run_out_of_memory)
    return networks


def run_out_of_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB (planted)")


if os.environ["RANK"] == "1" and os.environ.get("TRIMARAN_ATTEMPT", "0") == "0":
    rebuild.build_empty_networks = build_too_large  # pyrefly: ignore[bad-assignment]
apply_change.FAILED_SECONDS = 1.0

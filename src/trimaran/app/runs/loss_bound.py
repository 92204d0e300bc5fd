"""What a fault of this run costs at most, in words."""

import math
from collections.abc import Mapping
from typing import Any

from trimaran.core import show_seconds


def loss_bound_text(bound: Mapping[str, Any], *, total_steps: int) -> str:
    """Return a sentence about the data of a `loss_bound` event of a run of `total_steps`; empty if there is none."""
    if not bound:
        return ""
    rank, node = (
        _cost(bound.get(f"{prefix}steps"), bound.get(f"{prefix}seconds"), total_steps) for prefix in ("", "node_")
    )
    return f"repeated after a fault of a rank: {rank}; after the loss of the node: {node}"


def _cost(steps: Any, seconds: Any, total_steps: int) -> str:
    if not _is_number(steps) or not _is_number(seconds) or steps >= total_steps:
        return "everything since the last checkpoint"
    return f"at most {round(steps)} steps (about {show_seconds(seconds)})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""What a fault of this run costs at most, in words."""

import math
from collections.abc import Mapping
from typing import Any

from trimaran.core import show_seconds


def loss_bound_text(bound: Mapping[str, Any]) -> str:
    """Return a sentence about the data of a `loss_bound` event; empty if there is none."""
    if not bound:
        return ""
    rank, node = (_cost(bound.get(f"{prefix}steps"), bound.get(f"{prefix}seconds")) for prefix in ("", "node_"))
    return f"repeated after a fault of a rank: {rank}; after the loss of the node: {node}"


def _cost(steps: Any, seconds: Any) -> str:
    if not _is_number(steps) or not _is_number(seconds):
        return "everything since the last checkpoint"
    return f"at most {round(steps)} steps (about {show_seconds(seconds)})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

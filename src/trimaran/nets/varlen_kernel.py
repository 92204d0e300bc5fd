"""torch's kernel for attention inside segments, on a GPU."""

from inspect import signature
from typing import Any

from torch.nn.attention.varlen import varlen_attn

__all__ = ["GQA_OPTION", "varlen_attn"]

# The kernel supports grouped heads; from torch 2.12 on an option must enable that.
GQA_OPTION: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

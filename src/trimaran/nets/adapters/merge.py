"""Merges an adapter into the layers that it belongs to, so that they are plain linear layers again."""

import torch
from torch import nn

from trimaran.nets.adapters.lora_linear import ADAPTER_PARAMETERS, LoraLinear, merged_weight


@torch.no_grad()
def merge_in_place(module: nn.Module) -> None:
    """Turn every `LoraLinear` of an unsharded module into an `nn.Linear`, whose weight keeps its dtype."""
    for layer in list(module.modules()):
        if isinstance(layer, LoraLinear):
            weight = merged_weight(layer)
            layer.weight.copy_(weight)
            for name in ADAPTER_PARAMETERS:
                delattr(layer, name)
            layer.__class__ = nn.Linear  # pyrefly: ignore[bad-argument-type]

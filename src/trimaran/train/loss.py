"""The loss, summed; it is divided once, by the valid tokens of the global batch."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over the labels that are not `IGNORED`, in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def gradient_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Return the norm over all gradients of the model, the same on every rank however they are sharded."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm

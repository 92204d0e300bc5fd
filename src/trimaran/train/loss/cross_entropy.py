"""The loss, summed; it is divided once, by the valid tokens of the global batch."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from trimaran.parallel import vocabulary_loss
from trimaran.parallel.vocab_parallel_loss import vocabulary_losses

IGNORED = -100


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over the labels that are not `IGNORED`, in fp32."""
    if isinstance(logits, DTensor):
        return vocabulary_loss(logits, labels, ignored=IGNORED)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label, in fp32, in one row; 0 where it is `IGNORED`."""
    if isinstance(logits, DTensor):
        return vocabulary_losses(logits, labels, ignored=IGNORED)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")


def row_losses(logits: Tensor, labels: Tensor, *, lift: float | None) -> Tensor:
    """Return the cross-entropy of each row of `logits` [N, V], in fp32 at least; 0 where the label is `IGNORED`.

    The logits are then gone: their gradient times `lift` stands in their place. Without a `lift` there is none, and
    they stay.
    """
    if logits.is_cuda:
        from trimaran.train.loss.kernels import cross_entropy  # noqa: PLC0415  Triton is there where CUDA is

        return cross_entropy.row_losses(logits, labels, ignored=IGNORED, lift=lift)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORED
    tokens = torch.where(valid, labels, 0).unsqueeze(1)
    whole = wide.logsumexp(1, keepdim=True)
    losses = torch.where(valid, (whole - wide.gather(1, tokens)).squeeze(1), 0.0)
    if lift is not None:
        slopes = torch.sub(wide, whole, out=wide).exp_()
        slopes.scatter_add_(1, tokens, slopes.new_full((1, 1), -1.0).expand_as(tokens)).mul_(lift)
        logits.copy_(slopes.masked_fill_(~valid.unsqueeze(1), 0.0))
    return losses


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times `factor`, which has one element, in `dtype`; where that is the tensor's own, in place."""
    if tensor.is_cuda:
        from trimaran.train.loss.kernels import scale  # noqa: PLC0415

        return scale.scaled(tensor, factor, dtype)
    return tensor.mul_(factor) if tensor.dtype == dtype else (tensor * factor).to(dtype)

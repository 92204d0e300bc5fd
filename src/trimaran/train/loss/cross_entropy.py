"""Cross-entropy, summed over tokens. The stepper divides it once, by the valid tokens of the global batch.

With label smoothing s the target is 1 - s of the label and s spread evenly over the vocabulary, as in torch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trimaran.nets.shard_types import is_dtensor

IGNORED = -100


def summed_loss(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy summed over the labels that are not `IGNORED`, in fp32."""
    if is_dtensor(logits):
        from trimaran.parallel import vocab_parallel_cross_entropy  # noqa: PLC0415  only tp shards the vocabulary

        return vocab_parallel_cross_entropy(logits, labels, ignored=IGNORED, smoothing=smoothing)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum",
                           label_smoothing=smoothing)  # fmt: skip


def token_losses(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each label, flat, in fp32; 0 where the label is `IGNORED`."""
    if is_dtensor(logits):
        from trimaran.parallel import vocab_parallel_token_losses  # noqa: PLC0415  as above

        return vocab_parallel_token_losses(logits, labels, ignored=IGNORED, smoothing=smoothing)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none",
                           label_smoothing=smoothing)  # fmt: skip


def row_losses(logits: Tensor, labels: Tensor, *, grad_scale: float | None, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each row of `logits` [N, V], in fp32 or wider; 0 where the label is `IGNORED`.

    The logits are overwritten with their gradient times `grad_scale`. With `grad_scale` None they are not changed.
    """
    if logits.is_cuda and not smoothing:  # our kernel does not smooth
        from trimaran.train.loss.kernels import cross_entropy  # noqa: PLC0415  only CUDA builds have Triton

        return cross_entropy.row_losses(logits, labels, ignored=IGNORED, grad_scale=grad_scale)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORED
    tokens = torch.where(valid, labels, 0).unsqueeze(1)
    of_label = wide.gather(1, tokens)
    if smoothing:
        of_label = (1 - smoothing) * of_label + smoothing * wide.mean(1, keepdim=True)
    if grad_scale is None:
        return torch.where(valid, (wide.logsumexp(1, keepdim=True) - of_label).squeeze(1), 0.0)
    largest = wide.amax(1, keepdim=True)
    gradient = torch.softmax(wide, 1, out=wide)  # in place: an exponential of each logit is slow, so it is the only one
    log_sum = largest - gradient.amax(1, keepdim=True).log()  # exact, as the largest probability is at least 1 / V
    gradient.scatter_add_(1, tokens, gradient.new_full((1, 1), smoothing - 1.0).expand_as(tokens))
    if smoothing:
        gradient.sub_(smoothing / gradient.shape[1])
    if grad_scale != 1:
        gradient.mul_(grad_scale)
    if not bool(valid.all()):
        gradient.masked_fill_(~valid.unsqueeze(1), 0.0)
    if gradient is not logits:
        logits.copy_(gradient)
    return torch.where(valid, (log_sum - of_label).squeeze(1), 0.0)


def scale_to_dtype(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times the one-element tensor `factor`, in `dtype`; in place if the tensor already has it."""
    if tensor.is_cuda:
        from trimaran.train.loss.kernels import scale  # noqa: PLC0415

        return scale.scale_to_dtype(tensor, factor, dtype)
    return tensor.mul_(factor) if tensor.dtype == dtype else (tensor * factor).to(dtype)

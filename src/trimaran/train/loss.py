"""The loss, summed; it is divided once, by the valid tokens of the global batch."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from trimaran.parallel import vocabulary_loss
from trimaran.parallel.vocabulary import vocabulary_losses

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

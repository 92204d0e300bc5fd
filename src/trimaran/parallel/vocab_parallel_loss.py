"""The loss of logits that are split over the vocabulary: no rank ever has a whole row of them.

torch's `loss_parallel` does the same while its context is open, but backward has to run in that context too (a pipeline
schedule runs it from inside torch), and it keeps a second copy of the logits.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def vocabulary_loss(logits: DTensor, labels: Tensor, *, ignored: int) -> Tensor:
    """Return the summed cross-entropy of `logits` [..., vocabulary], split along the last dimension, in fp32."""
    return vocabulary_losses(logits, labels, ignored=ignored).sum()


def vocabulary_losses(logits: DTensor, labels: Tensor, *, ignored: int) -> Tensor:
    """Return the cross-entropy of each of `labels`, in one row; 0 where it is `ignored`."""
    (axis,) = logits.placements
    assert axis.is_shard(logits.ndim - 1), "the head splits its columns"
    group = logits.device_mesh.get_group()
    local = logits.to_local().flatten(0, -2).float()
    places, valid = labels.flatten() - group.rank() * local.shape[-1], labels.flatten() != ignored
    return _SplitCrossEntropy.apply(local, places, valid, group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Three small sums over the ranks make the loss; the gradient needs none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, valid: Tensor, group: dist.ProcessGroup) -> Tensor:
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        here = valid & (places >= 0) & (places < logits.shape[-1])
        places = places.clamp(0, logits.shape[-1] - 1)[:, None]
        shares = (logits - highest[:, None]).exp_()
        wanted = logits.gather(-1, places)[:, 0].sub_(highest).mul_(here)
        sums = torch.stack([shares.sum(dim=-1), wanted])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(shares.div_(sums[0][:, None]), places, here, valid)
        return (sums[0].log() - sums[1]) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        shares, places, here, valid = ctx.saved_tensors
        gradient = shares.scatter_add(-1, places, -here[:, None].to(shares.dtype))
        return gradient.mul_((valid * gradients[0])[:, None]), None, None, None

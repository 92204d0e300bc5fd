"""Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

torch's `loss_parallel` does the same, but backward must run inside its context (a pipeline schedule runs backward
inside torch), and it keeps a second copy of the logits.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.parallel.comm.axis_waits import axis_span

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def vocab_parallel_token_losses(logits: "DTensor", labels: Tensor, *, ignored: int, smoothing: float = 0.0) -> Tensor:
    """Return the fp32 cross-entropy of each label, flattened; 0 where the label is `ignored`, NaN if it is no token.

    `smoothing` is the part of the target that is spread evenly over the whole vocabulary. The last ranks hold fewer
    columns than the others if the number of ranks does not divide the vocabulary.
    """
    (placement,) = logits.placements
    assert placement.is_shard(logits.ndim - 1), "the head must shard its columns"
    group = logits.device_mesh.get_group()
    local = logits.to_local().flatten(0, -2)
    columns = -(-logits.shape[-1] // group.size())  # of every rank but the last ones
    labels = labels.flatten()
    local_labels, valid = labels - group.rank() * columns, labels != ignored
    if local.is_cuda and not smoothing:
        losses = _FusedCrossEntropy.apply(local, torch.where(valid, local_labels, -1), valid, group)
    else:
        vocabulary = logits.shape[-1]
        losses = _VocabParallelCrossEntropy.apply(local.float(), local_labels, valid, group, smoothing, vocabulary)
    is_wrong = valid & ((labels < 0) | (labels >= logits.shape[-1]))
    return losses.masked_fill(is_wrong, float("nan"))


class _FusedCrossEntropy(torch.autograd.Function):
    """On a GPU: each pass reads the logits once, in their own dtype, and only they are saved for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, group: dist.ProcessGroup) -> Tensor:
        from trimaran.parallel.kernels.vocab_rows import row_sums  # noqa: PLC0415  needs Triton

        local_highest, totals, chosen = row_sums(logits, labels)
        highest = local_highest.clone()
        with axis_span("tp"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        sums = torch.stack([totals * (local_highest - highest).exp(), chosen])
        with axis_span("tp"):
            dist.all_reduce(sums, group=group)
        log_sums = highest + sums[0].log()
        ctx.save_for_backward(logits, labels, log_sums, valid)
        return (log_sums - sums[1]) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        from trimaran.parallel.kernels.vocab_rows import row_gradients  # noqa: PLC0415

        logits, labels, log_sums, valid = ctx.saved_tensors
        return row_gradients(logits, labels, log_sums, gradients[0] * valid), None, None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward all-reduces the maximum, the sum of exponentials and the label's logit. Backward is local.

    With label smoothing it also all-reduces the sum of the logits; `size` is that of the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, group: dist.ProcessGroup, smoothing: float, size: int
    ) -> Tensor:
        highest = logits.max(dim=-1).values
        with axis_span("tp"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        is_local = valid & (labels >= 0) & (labels < logits.shape[-1])
        columns = labels.clamp(0, logits.shape[-1] - 1)[:, None]
        shifted = logits - highest[:, None]
        parts = [shifted.gather(-1, columns)[:, 0].mul_(is_local), *([shifted.sum(dim=-1)] if smoothing else [])]
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), *parts])
        with axis_span("tp"):
            dist.all_reduce(sums, group=group)
        ctx.smoothing, ctx.size = smoothing, size
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), columns, is_local, valid)
        expected = (1 - smoothing) * sums[1] + smoothing / size * sums[2] if smoothing else sums[1]
        return (sums[0].log() - expected) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        probabilities, columns, is_local, valid = ctx.saved_tensors
        on_label = (ctx.smoothing - 1) * is_local[:, None].to(probabilities.dtype)
        gradient = probabilities.scatter_add(-1, columns, on_label)
        if ctx.smoothing:
            gradient.sub_(ctx.smoothing / ctx.size)
        return gradient.mul_((valid * gradients[0])[:, None]), None, None, None, None, None

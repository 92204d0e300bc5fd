"""Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

torch's `loss_parallel` does the same, but backward must run inside its context (a pipeline schedule runs backward
inside torch), and it keeps a second copy of the logits.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.parallel.comm.axis_waits import axis_span

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def vocab_parallel_cross_entropy(logits: "DTensor", labels: Tensor, *, ignored: int, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of `logits` [..., vocabulary], sharded along the last dim, in fp32."""
    return vocab_parallel_token_losses(logits, labels, ignored=ignored, smoothing=smoothing).sum()


def vocab_parallel_token_losses(logits: "DTensor", labels: Tensor, *, ignored: int, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each label, flattened; 0 where the label is `ignored`, NaN if it is no token.

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
    if smoothing:
        target = SmoothedTarget(smoothing, logits.shape[-1])
        losses = _SmoothedCrossEntropy.apply(local.float(), local_labels, valid, group, target)
    elif local.is_cuda:
        losses = _FusedCrossEntropy.apply(local, torch.where(valid, local_labels, -1), valid, group)
    else:
        losses = _VocabParallelCrossEntropy.apply(local.float(), local_labels, valid, group)
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
    """Forward all-reduces the maximum, the sum of exponentials and the label's logit. Backward is local."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local_labels: Tensor, valid: Tensor, group: dist.ProcessGroup) -> Tensor:
        highest = logits.max(dim=-1).values
        with axis_span("tp"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        is_local = valid & (local_labels >= 0) & (local_labels < logits.shape[-1])
        columns = local_labels.clamp(0, logits.shape[-1] - 1)[:, None]
        exponentials = (logits - highest[:, None]).exp_()
        label_logits = logits.gather(-1, columns)[:, 0].sub_(highest).mul_(is_local)
        sums = torch.stack([exponentials.sum(dim=-1), label_logits])
        with axis_span("tp"):
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), columns, is_local, valid)
        return (sums[0].log() - sums[1]) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        probabilities, columns, is_local, valid = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, columns, -is_local[:, None].to(probabilities.dtype))
        return gradient.mul_((valid * gradients[0])[:, None]), None, None, None


class SmoothedTarget(NamedTuple):
    """The part of a target that is spread evenly over the vocabulary, and the size of the whole vocabulary."""

    smoothing: float
    vocabulary: int


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The same with label smoothing: forward also all-reduces the sum of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local_labels: Tensor, valid: Tensor, group: dist.ProcessGroup, target: SmoothedTarget
    ) -> Tensor:
        highest = logits.max(dim=-1).values
        with axis_span("tp"):
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        is_local = valid & (local_labels >= 0) & (local_labels < logits.shape[-1])
        columns = local_labels.clamp(0, logits.shape[-1] - 1)[:, None]
        shifted = logits - highest[:, None]
        of_label, total = shifted.gather(-1, columns)[:, 0] * is_local, shifted.sum(dim=-1)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), of_label, total])
        with axis_span("tp"):
            dist.all_reduce(sums, group=group)
        ctx.target = target
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), columns, is_local, valid)
        expected = (1 - target.smoothing) * sums[1] + target.smoothing / target.vocabulary * sums[2]
        return (sums[0].log() - expected) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        probabilities, columns, is_local, valid = ctx.saved_tensors
        smoothing, vocabulary = ctx.target
        on_label = (smoothing - 1) * is_local[:, None].to(probabilities.dtype)
        gradient = probabilities.scatter_add(-1, columns, on_label).sub_(smoothing / vocabulary)
        return gradient.mul_((valid * gradients[0])[:, None]), None, None, None, None

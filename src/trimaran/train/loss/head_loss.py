"""The head of a language model and its loss in one: the logits are not kept, their gradient takes their place.

The gradient of a summed loss is known as soon as the logits are, but for one factor. So the products with it are made
in forward already, and backward only multiplies their results.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.precision import own_dtype
from trimaran.train.loss.cross_entropy import row_losses, scaled

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 2**20  # of logits that exist at a time when they are made piece by piece
LEAST_ROWS, ROW_MULTIPLE = 1024, 128  # of a piece: fewer rows would leave parts of a GPU without work
LIFT = 2.0**10  # what gradients of logits are multiplied by in fp16, which has nothing below 6e-8


class LossHead:
    """A head that can end in the loss instead of in logits. Its module's `forward` is replaced, its names stay."""

    def __init__(self, head: nn.Linear, *, chunked: bool) -> None:
        assert head.bias is None, "the gradient of a bias is not made here"
        self._head, self._chunked, self._plain = head, chunked, head.forward
        self._labels: Tensor | None = None
        head.forward = self._forward

    @contextmanager
    def judging(self, labels: Tensor) -> Iterator[None]:
        """Let the head return losses of these labels while this is open, [1 + number of labels] in fp32.

        First stands their sum, through which gradients flow, then each, 0 where the label is `IGNORED`. It is one
        tensor, since that passes through whatever is around the head.
        """
        self._labels = labels.flatten()
        try:
            yield
        finally:
            self._labels = None

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._plain(hidden)
        weight = self._head.weight
        assert not isinstance(weight, DTensor), "a head that tp splits ends in logits"
        hidden = hidden.flatten(0, -2).to(self._dtype(hidden))
        rows = piece_rows(weight.shape[0], hidden.element_size()) if self._chunked else max(1, len(hidden))
        return torch.cat(head_losses(hidden, weight, self._labels, rows=rows))

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        """Return what the head's products are computed in: what the recipe or the plan says, or else as they come."""
        if (own := own_dtype(self._head)) is not None:
            return own
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def loss_head(network: Network, plan: Plan) -> LossHead | None:
    """Return the network's head, made to end in the loss as the plan says; None where it ends in logits."""
    if plan.loss == "logits" or plan.mesh.tp > 1:
        return None
    head = network.head
    if not isinstance(head, nn.Linear) or head.bias is not None:
        log.warning("plan.loss is %s, but this model does more than a product for its logits: they stay", plan.loss)
        return None
    return LossHead(head, chunked=plan.loss == "chunked")


def piece_rows(vocab: int, element_size: int) -> int:
    """Return how many rows of logits are made at a time."""
    return max(LEAST_ROWS, PIECE_BYTES // (vocab * element_size) // ROW_MULTIPLE * ROW_MULTIPLE)


def head_losses(hidden: Tensor, weight: Tensor, labels: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy [1] of `hidden` [N, H] times `weight` [V, H], and that of each row [N], in fp32.

    Products are in the dtype of `hidden`. Only `rows` rows of logits exist at a time. Gradients flow through the sum.
    """
    assert len(labels) == len(hidden), "each row has a label"
    return _HeadLoss.apply(hidden, weight, labels, rows, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    """See `head_losses`. `wanted` says whether gradients are: in here torch does not tell."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, wanted: bool) -> tuple[Any, ...]:
        needs = tuple(wanted and each for each in ctx.needs_input_grad[:2])
        ctx.needs, ctx.dtypes = needs, (hidden.dtype, weight.dtype)
        ctx.lift = LIFT if hidden.dtype == torch.float16 else 1.0
        with torch.autocast(hidden.device.type, enabled=False):
            each, *gradients = _judge(hidden, weight.to(hidden.dtype), labels, rows, needs, ctx.lift)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.mark_non_differentiable(each)
        return each.sum().reshape(1), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        factor, kept = gradients[0] / ctx.lift, iter(ctx.saved_tensors)
        pairs = zip(ctx.needs, ctx.dtypes, strict=True)
        return *(scaled(next(kept), factor, dtype) if needed else None for needed, dtype in pairs), None, None, None


def _judge(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, needs: tuple[bool, ...], lift: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each row, and `lift` times the gradients of their sum that are needed."""
    # A sum over pieces, and one of fp16 that was lifted, is more than 16 bits hold.
    wide = rows < len(hidden) or hidden.dtype == torch.float16
    of_hidden, of_weight = torch.empty_like(hidden) if needs[0] else None, None
    buffer, losses = hidden.new_empty(min(rows, len(hidden)), len(weight)), []
    for start in range(0, max(1, len(hidden)), rows):
        some = hidden[start : start + rows]
        logits = torch.mm(some, weight.t(), out=buffer[: len(some)])
        losses.append(row_losses(logits, labels[start : start + rows], lift=lift if any(needs) else None))
        if of_hidden is not None:
            torch.mm(logits, weight, out=of_hidden[start : start + rows])
        if needs[1]:
            of_weight = _plus(of_weight, logits.t(), some) if wide else torch.mm(logits.t(), some)
    return torch.cat(losses), of_hidden, of_weight


def _plus(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return `total`, in place, with the product of the other two added to it, in fp32 at least."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:  # only there a product may be wider than what goes in
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    left, right = left.to(dtype), right.to(dtype)
    return torch.mm(left, right) if total is None else total.addmm_(left, right)

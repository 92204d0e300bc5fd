"""Triton kernels: the cross-entropy of rows of logits, and a large tensor times a scalar tensor."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

# Logits that one program loads at a time. It reads its row twice; the second time, most of the row is in the cache.
BLOCK, WARPS = 8192, 16


def row_losses(logits: Tensor, labels: Tensor, *, ignored: int, grad_scale: float | None) -> Tensor:
    """Return the loss of each row of `logits` [N, V], fp32 [N]; 0 where the label is `ignored`.

    The logits are overwritten with their gradient times `grad_scale`. With `grad_scale` None they are not changed. Rows
    may have any stride, but the logits of a row must be contiguous. A label outside the vocabulary makes the loss of
    its row NaN.
    """
    rows, vocab = logits.shape
    assert vocab == 1 or logits.stride(1) == 1, "the logits of a row must be contiguous"
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        with torch.cuda.device(logits.device):
            _row[(rows,)](
                logits,
                labels.contiguous(),
                losses,
                logits.stride(0),
                vocab,
                ignored,
                grad_scale or 0.0,
                BLOCK=block,
                GRADIENT=grad_scale is not None,
                num_warps=max(1, min(WARPS, block // 256)),
            )
    return losses


@triton.jit
def _row(logits, labels, losses, stride, vocab, ignored, grad_scale, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)  # the offset of a row may exceed 2^31 logits
    at = logits + row * stride
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(at + columns, 0.0, mask=columns < vocab)
    else:
        # Load this before the reductions below, which synchronise all threads: after them another thread may have
        # overwritten it with a gradient.
        is_token = (label >= 0) & (label < vocab)
        chosen = tl.load(at + label, mask=is_token, other=float("nan")).to(tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(at + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
            top = higher
        log_sum = top + tl.log(total)
        tl.store(losses + row, log_sum - chosen)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                x = tl.load(at + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)
                tl.store(at + columns, (gradient * grad_scale).to(logits.dtype.element_ty), mask=columns < vocab)


SCALE_BLOCK, SCALE_WARPS = 4096, 8


def scale_to_dtype(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` times the one-element tensor `factor`, in `dtype`; in place if the tensor already has it.

    Torch multiplies a bf16 tensor by an fp32 scalar tensor at a fifth of the memory bandwidth.
    """
    assert tensor.is_contiguous(), "the kernel reads the tensor as one flat array"
    out = tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
    if count := tensor.numel():
        with torch.cuda.device(tensor.device):
            grid = (triton.cdiv(count, SCALE_BLOCK),)
            _scale[grid](tensor, out, factor, count, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS)
    return out


@triton.jit
def _scale(source, out, factor, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)

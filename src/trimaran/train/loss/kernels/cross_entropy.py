"""The cross-entropy of each row of logits on a GPU; its gradient takes the logits' place in the same pass."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

# Logits that one program looks at together. It goes through its row twice: the second time most of it is in the cache.
BLOCK, WARPS = 8192, 16


def row_losses(logits: Tensor, labels: Tensor, *, ignored: int, lift: float | None) -> Tensor:
    """Return the loss of each row of `logits` [N, V], fp32 [N]; 0 where the label is `ignored`.

    The logits are then gone: their gradient times `lift` stands in their place. Without a `lift` they stay. A row may
    begin anywhere, but its logits lie side by side. A label that is no token makes the loss of its row no number.
    """
    rows, vocab = logits.shape
    assert vocab == 1 or logits.stride(1) == 1, "the logits of a row lie side by side"
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
                lift or 0.0,
                BLOCK=block,
                GRADIENT=lift is not None,
                num_warps=max(1, min(WARPS, block // 256)),
            )
    return losses


@triton.jit
def _row(logits, labels, losses, stride, vocab, ignored, lift, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):  # noqa: N803, PLR0913
    row = tl.program_id(0).to(tl.int64)  # a row may begin more than 2^31 logits behind the first
    at = logits + row * stride
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(at + columns, 0.0, mask=columns < vocab)
    else:
        # Read before the sums below, at which all threads meet: behind them the first may overwrite it.
        known = (label >= 0) & (label < vocab)
        chosen = tl.load(at + label, mask=known, other=float("nan")).to(tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(at + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
            top = higher
        whole = top + tl.log(total)
        tl.store(losses + row, whole - chosen)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                x = tl.load(at + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
                slope = tl.exp(x - whole) - tl.where(columns == label, 1.0, 0.0)
                tl.store(at + columns, (slope * lift).to(logits.dtype.element_ty), mask=columns < vocab)

"""`loop.gather`: the rows of all ranks, with gradients, for losses that compare rows of the whole batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import all_gather_json

WHERE = "loop.gather(x)"


def gather_rows(rows: Tensor, *, is_padding: bool, dim: int) -> Tensor:
    """Return the rows of all ranks along `dim`, in rank order. Every rank must call it.

    Ranks may have different numbers of rows; those of a rank with `is_padding` are left out. The gradient that a rank's
    rows get is the sum of the gradients of all ranks.
    """
    shape = list(rows.shape)
    if not -rows.ndim <= dim < rows.ndim:
        raise UserError("P146", f"a tensor of shape {shape} has no dimension {dim} with rows", where=WHERE,
                        fix="pass a tensor with a row for each sample, along dim=...")  # fmt: skip
    if dist.get_world_size() == 1:
        return rows
    first = rows.movedim(dim, 0)
    described = [str(first.dtype), list(first.shape[1:]), 0 if is_padding else len(first)]
    ranks = all_gather_json(described)
    if any(each[:2] != ranks[0][:2] for each in ranks):
        shapes = "; ".join(f"rank {rank} has rows of {kind} {size}" for rank, (kind, size, _) in enumerate(ranks))
        raise UserError("P146", f"the rows of the ranks differ in shape or type: {shapes}", where=WHERE,
                        fix="pad them to the same shape; only the number of rows may differ")  # fmt: skip
    whole = _AllGather.apply(first, [count for *_, count in ranks])
    return whole.movedim(0, dim)


class _AllGather(torch.autograd.Function):
    """All-gather along dim 0 in forward; sum the gradients over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.start, ctx.count, ctx.num_rows = sum(counts[: dist.get_rank()]), counts[dist.get_rank()], len(rows)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: ctx.count] = rows[: ctx.count]
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyrefly: ignore[bad-override]
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        mine = total.new_zeros(ctx.num_rows, *total.shape[1:])
        mine[: ctx.count] = total[ctx.start : ctx.start + ctx.count]
        return mine, None

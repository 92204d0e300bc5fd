"""A linear layer whose three matmuls are fp8, with dynamic per-tensor scaling."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core.engine_rules import RECIPE_MULTIPLES
from trimaran.nets.local_shards import local_bias, local_for_compute, replicated_forward
from trimaran.nets.shard_types import is_dtensor
from trimaran.parallel.fp8_blocks import BlockMatmul

# Forward operands need more precision (e4m3), gradients more range (e5m2).
FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
MIN_AMAX = 1e-30  # avoids a division by zero for a tensor of zeros


class GatheredWeight(NamedTuple):
    """A weight in fp8, and its largest magnitude, or the scale of each of its 128x128 blocks."""

    values: Tensor
    amax: Tensor | None
    scales: Tensor | None


class Fp8Linear(nn.Linear):
    """An `nn.Linear` with bf16 inputs and outputs and fp8 matmuls.

    Created by changing the class of a linear layer. Weights may be fp32 or bf16, and sharded by tensor parallelism:
    then each rank computes the scales of its own shards, without communication.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not is_dtensor(input):
            return self._local_forward(input, gradient_is_partial=True)
        return replicated_forward(self._local_forward, input)

    recipe: str = "tensor"
    gathered: "GatheredWeight | None" = None
    """The weight as FSDP gathered it, in fp8; None if the layer casts its weight."""

    def _local_forward(self, x: Tensor, *, gradient_is_partial: bool) -> Tensor:
        weight = local_for_compute(self.weight, gradient_is_partial=gradient_is_partial)
        out = linear(x, weight, self.recipe, self.gathered)
        bias = local_bias(self, gradient_is_partial=gradient_is_partial)
        return out if bias is None else out + bias.to(out.dtype)


class BlockFp8Linear(Fp8Linear):
    """The same with a scale for each 1x128 values of rows and gradients, and for each 128x128 of the weight."""

    recipe = "block"


class MxFp8Linear(Fp8Linear):
    """The same with a power of two for each 1x32 values of every operand (MXFP8), on Blackwell GPUs."""

    recipe = "mx"


LAYERS: dict[str, type[Fp8Linear]] = {each.recipe: each for each in (Fp8Linear, BlockFp8Linear, MxFp8Linear)}
"""The layer of each recipe, see `core.plan.Fp8`."""


def linear(x: Tensor, weight: Tensor, recipe: str = "tensor", gathered: GatheredWeight | None = None) -> Tensor:
    """Return `x @ weight.T` in bf16.

    fp8 matmuls need sizes that are multiples of 16, or of the recipe's blocks. Rows are padded with zeros; a weight
    shard of another size is multiplied in bf16. If the weight was `gathered` in fp8, `weight` only has a gradient.
    """
    multiple = RECIPE_MULTIPLES[recipe]
    if any(size % multiple for size in weight.shape) or x.numel() == 0:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if missing := -num_rows % multiple:
        rows = F.pad(rows, (0, 0, 0, missing))
    values, amax_value, scales = gathered or (None, None, None)
    if recipe == "tensor":
        out: Any = Fp8Matmul.apply(rows, weight, values, amax_value)
    else:
        out = BlockMatmul.apply(rows, weight, recipe == "mx", values, scales)
    return out[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


class Fp8Matmul(torch.autograd.Function):
    """The matmul of rows [N, K] and a weight [M, K], and its two gradients.

    Saves the rows in fp8 and the weight itself, which exists anyway: an fp8 copy would outlive the unsharded weight
    that FSDP frees. Backward casts the weight again, with the same scale. A weight that was gathered in fp8 is `values`
    with the largest magnitude `largest`: it is freed and gathered again in the same tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, values: Tensor | None = None, largest: Tensor | None = None
    ) -> Tensor:
        row_amax, weight_amax = amax(rows), amax(weight) if largest is None else largest
        rows8 = cast(rows, row_amax, FORWARD_DTYPE)
        weight8 = cast(weight, weight_amax, FORWARD_DTYPE) if values is None else values
        for_rows, for_weight, *_ = ctx.needs_input_grad
        saved = weight if values is None else values
        ctx.save_for_backward(rows8 if for_weight else None, row_amax, saved if for_rows else None, weight_amax)
        ctx.weight_dtype = weight.dtype
        # Fast accumulation is less exact, which is good enough in forward.
        return torch._scaled_mm(
            rows8, weight8.t(), row_amax / _max_value(FORWARD_DTYPE), weight_amax / _max_value(FORWARD_DTYPE),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        rows8, row_amax, weight, weight_amax = ctx.saved_tensors
        amax_value = amax(gradient)
        gradient8, gradient8_transposed = cast_both(gradient, amax_value, GRADIENT_DTYPE)
        scale, for_rows, for_weight = amax_value / _max_value(GRADIENT_DTYPE), None, None
        # Tensor cores need both operands contiguous along the reduced dim.
        if weight is not None:
            is_cast = weight.dtype == FORWARD_DTYPE
            weight8_transposed = (
                weight.t().contiguous() if is_cast else cast_transposed(weight, weight_amax, FORWARD_DTYPE)
            )
            for_rows = torch._scaled_mm(
                gradient8,
                weight8_transposed.t(),
                scale,
                weight_amax / _max_value(FORWARD_DTYPE),
                out_dtype=torch.bfloat16,
            )
        if rows8 is not None:
            for_weight = torch._scaled_mm(
                gradient8_transposed,
                rows8.t().contiguous().t(),
                scale,
                row_amax / _max_value(FORWARD_DTYPE),
                out_dtype=ctx.weight_dtype,
            )
        return for_rows, for_weight, None, None


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude as an fp32 scalar on the device; NaN if `x` has a NaN.

    Reduces per row first, so a compiled block can fuse it with the operator that produces the rows.
    """
    return x.detach().abs().amax(dim=-1).amax().float().clamp(min=MIN_AMAX)


def cast(x: Tensor, amax_value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in fp8, scaled so that `amax_value` becomes the largest fp8 value.

    Only an Inf can overflow; it makes every value NaN, which the step guard detects.
    """
    return (x.float() * (_max_value(dtype) / amax_value)).to(dtype).contiguous()


def cast_both(x: Tensor, amax_value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `cast(x)` and its transpose, both contiguous."""
    plain = cast(x, amax_value, dtype)
    return plain, plain.t().contiguous()


def cast_transposed(x: Tensor, amax_value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the transpose of `cast(x)`, contiguous."""
    return cast(x, amax_value, dtype).t().contiguous()


def _max_value(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max

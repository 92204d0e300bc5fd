"""A linear layer whose three products are fp8: one scale for each tensor, found anew each time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from trimaran.core.optional_packages import FP8_MULTIPLE

# What is multiplied forward needs more digits, gradients need more range.
DIGITS, RANGE = torch.float8_e4m3fn, torch.float8_e5m2
OWN_KERNELS = False  # whether a GPU turns tensors with `fp8_kernels`, or as the compiler does it
LEAST = 1e-30  # a tensor of zeros is scaled as if this were its largest: no division by zero


class Fp8Linear(nn.Linear):
    """A linear layer that takes and gives bf16 and multiplies in fp8. Its parameters are those of `nn.Linear`.

    An instance is made by giving a linear layer this class. Weights may be fp32 or bf16, whole or a slice of tensor
    parallelism: then each rank finds the scales of its own slices, and no maximum travels.
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            assert isinstance(input, DTensor), "a split layer is given a split input"
            out = _on_each_rank(input, self.weight)
        else:
            out = linear(input, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` in bf16.

    The products want multiples of 16 on each side. Rows are filled up with zeros; a slice of a weight that does not
    have them is multiplied in bf16.
    """
    if any(size % FP8_MULTIPLE for size in weight.shape) or x.numel() == 0:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if missing := -num_rows % FP8_MULTIPLE:
        rows = F.pad(rows, (0, 0, 0, missing))
    out: Any = Fp8Matmul.apply(rows, weight)
    return out[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


class Fp8Matmul(torch.autograd.Function):
    """The product of rows [N, K] and a weight [M, K], and its two gradients.

    Kept for backward are the rows in fp8 and the weight itself, which is there anyway: an fp8 copy of it would outlive
    the whole weight that FSDP gathers and lets go. It is cast again, with the same scale.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        row_most, weight_most = largest(rows), largest(weight)
        rows8, weight8 = cast(rows, row_most, DIGITS), cast(weight, weight_most, DIGITS)
        for_rows, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(rows8 if for_weight else None, row_most, weight if for_rows else None, weight_most)
        ctx.weight_dtype = weight.dtype
        # Sums of few bits are quicker, and good enough for what is not a gradient.
        return torch._scaled_mm(
            rows8, weight8.t(), row_most / _top(DIGITS), weight_most / _top(DIGITS),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        rows8, row_most, weight, weight_most = ctx.saved_tensors
        most = largest(gradient)
        gradient8, gradient8_turned = cast_both(gradient, most, RANGE)
        scale, for_rows, for_weight = most / _top(RANGE), None, None
        # The tensor cores read both operands along the sum, so each must lie that way.
        if weight is not None:
            weight8_turned = cast_turned(weight, weight_most, DIGITS)
            for_rows = torch._scaled_mm(
                gradient8, weight8_turned.t(), scale, weight_most / _top(DIGITS), out_dtype=torch.bfloat16
            )
        if rows8 is not None:
            for_weight = torch._scaled_mm(
                gradient8_turned, turned(rows8).t(), scale, row_most / _top(DIGITS), out_dtype=ctx.weight_dtype
            )
        return for_rows, for_weight


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude as an fp32 scalar on the device; not a number where `x` has one.

    Row by row first: a compiled block then finds it while it makes the rows, which norms and gates make row by row.
    """
    return x.detach().abs().amax(dim=-1).amax().float().clamp(min=LEAST)


def cast(x: Tensor, most: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in fp8, scaled so that `most` becomes the largest value there is.

    Nothing can overflow but what was infinite: that makes every value not a number, as the guard of the step expects.
    """
    return (x.float() * (_top(dtype) / most)).to(dtype).contiguous()


def cast_both(x: Tensor, most: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `cast` returns, and the same transposed."""
    if OWN_KERNELS and x.is_cuda:
        return _kernels().cast_both(x, _top(dtype) / most, dtype)
    plain = cast(x, most, dtype)
    return plain, plain.t().contiguous()


def cast_turned(x: Tensor, most: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `cast` returns, transposed and laid out row by row."""
    if OWN_KERNELS and x.is_cuda:
        return _kernels().cast_turned(x, _top(dtype) / most, dtype)
    return cast(x, most, dtype).t().contiguous()


def turned(x: Tensor) -> Tensor:
    """Return the transposed matrix, laid out row by row."""
    if OWN_KERNELS and x.is_cuda:
        return _kernels().turned(x)
    return x.t().contiguous()


def _kernels() -> Any:
    # Triton is only where a GPU is.
    from trimaran.parallel import fp8_kernels  # noqa: PLC0415

    return fp8_kernels


def _top(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _on_each_rank(x: DTensor, weight: DTensor) -> Tensor:
    """Return the product of slices: columns of it where the weight's rows are split, addends where its columns are."""
    (split,), mesh = weight.placements, weight.device_mesh
    (given,) = x.placements
    if split == Shard(0):
        x, own = x.redistribute(placements=(Replicate(),)), weight.to_local()
        rows, out = x.to_local(grad_placements=(Partial(),)), Shard(x.ndim - 1)
    elif split == Shard(1):
        x, own = x.redistribute(placements=(Shard(x.ndim - 1),)), weight.to_local()
        rows, out = x.to_local(), Partial()
    else:
        alike = given == Replicate()
        own = weight.to_local(grad_placements=(Replicate() if alike else Partial(),))
        rows, out = x.to_local(), given
    return DTensor.from_local(linear(rows, own), mesh, (out,), run_check=False)

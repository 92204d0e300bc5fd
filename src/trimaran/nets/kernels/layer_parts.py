"""Kernels of a layer between its matmuls, forward and backward: RMSNorm, rotary positions and SwiGLU."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

# A program sums the gradient of the weight over its rows; a second kernel adds these sums, in a fixed order.
PROGRAMS_PER_MULTIPROCESSOR, ROWS, STAGES = 4, 1, 3
VALUES_PER_THREAD = 8
MAX_STAGED_ROW_BYTES = 16384  # shared memory holds three tensors and `STAGES` of such rows
SUM_COLUMNS, SUM_ROWS = 32, 256
# A program covers some heads of some consecutive tokens; heads of one token share its cosines and sines.
HEADS, TOKENS, WARPS = 8, 4, 2
BLOCK = 2048


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of `x` [rows, width], computed in fp32 with the weight rounded to the dtype of `x`."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _norm_forward[(triton.cdiv(rows, ROWS),)](
            x, weight, out, rows, width, eps, PADDED=padded, ROWS=ROWS, num_warps=_warps(ROWS * padded)
        )
    return out


def norm_backward(
    x: Tensor, weight: Tensor, grad_residual: Tensor | None, grad_normed: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` [rows, width] and of the weight, given those of the residual and of the norm."""
    x = x.contiguous()
    residual = x if grad_residual is None else grad_residual.contiguous()
    rows, width = x.shape
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(triton.cdiv(rows, ROWS), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    weight_sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    stages = STAGES if padded * x.element_size() <= MAX_STAGED_ROW_BYTES else 1
    with torch.cuda.device(x.device):
        _norm_backward[(programs,)](
            x, weight, residual, grad_normed.contiguous(), grad_x, weight_sums, rows, width, eps,
            PADDED=padded, ROWS=ROWS, STAGES=stages, HAS_RESIDUAL=grad_residual is not None,
            num_warps=_warps(ROWS * padded),
        )  # fmt: skip
        _sum_rows[(triton.cdiv(width, SUM_COLUMNS),)](
            weight_sums, grad_weight, programs, width, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8
        )
    return grad_x, grad_weight


def _warps(values: int) -> int:
    return max(1, min(16, values // (32 * VALUES_PER_THREAD)))


@triton.jit
def _norm_forward(x, weight, out, rows, width, eps, PADDED: tl.constexpr, ROWS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (column < width) & (row < rows)
    dtype = x.dtype.element_ty
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(dtype).to(tl.float32)
    offset = row.to(tl.int64) * width + column
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
    tl.store(out + offset, (value * inverse_rms * scale).to(dtype), mask=mask)


@triton.jit
def _norm_backward(
    x, weight, grad_residual, grad_normed, grad_x, weight_sums, rows, width, eps,
    PADDED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, PADDED)[None, :]
    in_row = column < width
    dtype = x.dtype.element_ty
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(dtype).to(tl.float32)
    weight_sum = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = in_row & (row < rows)
        offset = row.to(tl.int64) * width + column
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(grad_normed + offset, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
        value = value * inverse_rms
        scaled = gradient * scale
        mean = tl.sum(value * scaled, axis=1, keep_dims=True) / width
        total = (scaled - value * mean) * inverse_rms
        if HAS_RESIDUAL:
            total += tl.load(grad_residual + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + offset, total.to(dtype), mask=mask)
        weight_sum += gradient * value
    out = weight_sums + program * width + tl.arange(0, PADDED)
    tl.store(out, tl.sum(weight_sum, axis=0), mask=tl.arange(0, PADDED) < width)


@triton.jit
def _sum_rows(source, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(source + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < width)


def rotate_in_place(packed: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> None:
    """Apply RoPE to the first `heads` heads of `packed` [B, T, all heads x head_dim], in place."""
    batch, length, width = packed.shape
    head_dim = cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    with torch.cuda.device(packed.device):
        _rotate_packed[(triton.cdiv(batch * length, TOKENS), triton.cdiv(heads, HEADS))](
            packed, cos, sin, batch * length, length, heads, width, cos.stride(0) if cos.shape[0] > 1 else 0,
            HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2), HEADS=HEADS, TOKENS=TOKENS,
            num_warps=WARPS,
        )  # fmt: skip


def rotary_backward(queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value] of the joint projection, given those of its three parts.

    They are [B, heads, T, head_dim]. `cos` and `sin` [1 or B, 1, T, head_dim] are the rotation of queries and keys.
    """
    batch, heads, length, head_dim = queries.shape
    kv_heads = keys.shape[1]
    out = torch.empty(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=queries.dtype, device=queries.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    queries, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (queries, keys, values))
    groups, kv_groups = triton.cdiv(heads, HEADS), triton.cdiv(kv_heads, HEADS)
    with torch.cuda.device(out.device):
        _rotate_backward[(triton.cdiv(batch * length, TOKENS), groups + 2 * kv_groups)](
            queries, keys, values, out, cos, sin, batch * length, length, heads, kv_heads,
            cos.stride(0) if cos.shape[0] > 1 else 0,  # 0 if all rows share one rotation
            *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            GROUPS=groups, KV_GROUPS=kv_groups, HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2),
            HEADS=HEADS, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _rotate_packed(
    packed, cos, sin, tokens, length, heads, width, rotation_stride,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PADDED)[None, None, :]
    inside = (token < tokens) & (pair < HALF)
    at = packed + token * width + head * (2 * HALF) + pair
    angle = (token // length) * rotation_stride + (token % length) * (2 * HALF) + pair
    mask = inside & (head < heads)
    front, back = tl.load(at, mask=mask).to(tl.float32), tl.load(at + HALF, mask=mask).to(tl.float32)
    cos_front, cos_back = tl.load(cos + angle, mask=inside), tl.load(cos + angle + HALF, mask=inside)
    sin_front, sin_back = tl.load(sin + angle, mask=inside), tl.load(sin + angle + HALF, mask=inside)
    dtype = packed.dtype.element_ty
    tl.store(at, (front * cos_front - back * sin_front).to(dtype), mask=mask)
    tl.store(at + HALF, (back * cos_back + front * sin_back).to(dtype), mask=mask)


@triton.jit
def _rotate_backward(
    queries, keys, values, out, cos, sin, tokens, length, heads, kv_heads, rotation_stride,
    query_row, query_head, query_position, key_row, key_head, key_position, value_row, value_head, value_position,
    GROUPS: tl.constexpr, KV_GROUPS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    group = tl.program_id(1)
    out_width = (heads + 2 * kv_heads) * (2 * HALF)
    if group < GROUPS:
        _part_backward(
            queries, out, cos, sin, tokens, length, heads, rotation_stride, query_row, query_head, query_position,
            group, 0, out_width, HALF, PADDED, HEADS, TOKENS, True,
        )  # fmt: skip
    elif group < GROUPS + KV_GROUPS:
        _part_backward(
            keys, out, cos, sin, tokens, length, kv_heads, rotation_stride, key_row, key_head, key_position,
            group - GROUPS, heads, out_width, HALF, PADDED, HEADS, TOKENS, True,
        )  # fmt: skip
    else:
        _part_backward(
            values, out, cos, sin, tokens, length, kv_heads, rotation_stride, value_row, value_head, value_position,
            group - GROUPS - KV_GROUPS, heads + kv_heads, out_width, HALF, PADDED, HEADS, TOKENS, False,
        )  # fmt: skip


@triton.jit
def _part_backward(
    part, out, cos, sin, tokens, length, count, rotation_stride, row_stride, head_stride, position_stride,
    group, first_head, out_width,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROTATED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = group * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PADDED)[None, None, :]
    row, position = token // length, token % length
    inside = (token < tokens) & (pair < HALF)
    mask = inside & (head < count)
    source = part + row * row_stride + position * position_stride + head * head_stride + pair
    target = out + token * out_width + (first_head + head) * (2 * HALF) + pair
    front, back = tl.load(source, mask=mask), tl.load(source + HALF, mask=mask)
    if ROTATED:
        angle = row * rotation_stride + position * (2 * HALF) + pair
        cos_front, cos_back = tl.load(cos + angle, mask=inside), tl.load(cos + angle + HALF, mask=inside)
        sin_front, sin_back = tl.load(sin + angle, mask=inside), tl.load(sin + angle + HALF, mask=inside)
        first, second = front.to(tl.float32), back.to(tl.float32)
        front = (first * cos_front + second * sin_back).to(out.dtype.element_ty)
        back = (second * cos_back - first * sin_front).to(out.dtype.element_ty)
    tl.store(target, front, mask=mask)
    tl.store(target + HALF, back, mask=mask)


def gated_backward(packed: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `packed` [rows, gate | up], and silu(gate) * up, given its gradient [rows, width]."""
    rows, width = grad_inner.shape
    grad_packed, inner = torch.empty_like(packed), torch.empty_like(grad_inner)
    _gated_backward[(rows, triton.cdiv(width, BLOCK))](
        packed, grad_inner, grad_packed, inner, width, BLOCK=BLOCK, num_warps=8
    )
    return grad_packed, inner


@triton.jit
def _gated_backward(packed, grad_inner, grad_packed, inner, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    offset = row * width + column
    gate_offset = row * 2 * width + column
    gate = tl.load(packed + gate_offset, mask=mask).to(tl.float32)
    up = tl.load(packed + gate_offset + width, mask=mask).to(tl.float32)
    gradient = tl.load(grad_inner + offset, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dtype = packed.dtype.element_ty
    tl.store(inner + offset, (silu * up).to(dtype), mask=mask)
    tl.store(grad_packed + gate_offset, (gradient * up * (sigmoid + silu * (1 - sigmoid))).to(dtype), mask=mask)
    tl.store(grad_packed + gate_offset + width, (gradient * silu).to(dtype), mask=mask)


def gated_forward(packed: Tensor) -> Tensor:
    """Return silu(gate) * up of `packed` [rows, gate | up], computed in fp32."""
    packed = packed.contiguous()
    rows, width = len(packed), packed.shape[1] // 2
    inner = packed.new_empty(rows, width)
    with torch.cuda.device(packed.device):
        _gated_forward[(rows, triton.cdiv(width, BLOCK))](packed, inner, width, BLOCK=BLOCK, num_warps=8)
    return inner


@triton.jit
def _gated_forward(packed, inner, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(packed + row * 2 * width + column, mask=mask).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + column, mask=mask).to(tl.float32)
    tl.store(inner + row * width + column, (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty), mask=mask)

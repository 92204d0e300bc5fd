"""RoPE of a joint projection, in place, and its backward with the split into heads, each in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

# A program covers some heads of some consecutive tokens; heads of one token share its cosines and sines.
HEADS, TOKENS, WARPS = 8, 4, 2


def rotate_in_place(packed: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> None:
    """Apply RoPE to the first `heads` heads of `packed` [B, T, all heads x head_dim], in place.

    `cos` and `sin` [1 or B, 1, T, head_dim] are the rotation.
    """
    batch, length, width = packed.shape
    head_dim = cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    with torch.cuda.device(packed.device):
        _rotate_packed[(triton.cdiv(batch * length, TOKENS), triton.cdiv(heads, HEADS))](
            packed, cos, sin, batch * length, length, heads, width, _rotation_stride(cos),
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
            queries, keys, values, out, cos, sin, batch * length, length, heads, kv_heads, _rotation_stride(cos),
            *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            GROUPS=groups, KV_GROUPS=kv_groups, HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2),
            HEADS=HEADS, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return out


def _rotation_stride(cos: Tensor) -> int:
    """Return how far apart the rotations of two rows are: 0 if all rows share one."""
    return cos.stride(0) if cos.shape[0] > 1 else 0


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

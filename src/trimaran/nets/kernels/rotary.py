"""Backward of RoPE and of the split into queries, keys and values, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

HEADS_PER_PROGRAM = 8


def rotary_backward(queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value] of the joint projection, given those of its three parts.

    They are [B, heads, T, head_dim]. `cos` and `sin` [1 or B, 1, T, head_dim] are the rotation of queries and keys.
    """
    batch, heads, length, head_dim = queries.shape
    out_width = (heads + 2 * keys.shape[1]) * head_dim
    out = torch.empty(batch, length, out_width, dtype=queries.dtype, device=queries.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    rotation_stride = length * head_dim if cos.shape[0] > 1 else 0
    start = 0
    for part, rotated in ((queries, True), (keys, True), (values, False)):
        part = part if part.stride(-1) == 1 else part.contiguous()
        count = part.shape[1]
        _rotate_backward[(batch * length, triton.cdiv(count, HEADS_PER_PROGRAM))](
            part, out, cos, sin, start, out_width, length, count, rotation_stride, *part.stride()[:3],
            HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2), HEADS=HEADS_PER_PROGRAM, ROTATED=rotated,
            num_warps=4,
        )  # fmt: skip
        start += count * head_dim
    return out


@triton.jit
def _rotate_backward(  # noqa: PLR0913
    part, out, cos, sin, start, out_width, length, count, rotation_stride, row_stride, head_stride, position_stride,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, ROTATED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PADDED)[None, :]
    mask = (head < count) & (pair < HALF)
    source = part + row * row_stride + position * position_stride + head * head_stride + pair
    target = out + token * out_width + start + head * (2 * HALF) + pair
    front = tl.load(source, mask=mask)
    back = tl.load(source + HALF, mask=mask)
    if ROTATED:
        angle = row * rotation_stride + position * (2 * HALF) + pair
        in_head = pair < HALF
        cos_front, cos_back = tl.load(cos + angle, mask=in_head), tl.load(cos + angle + HALF, mask=in_head)
        sin_front, sin_back = tl.load(sin + angle, mask=in_head), tl.load(sin + angle + HALF, mask=in_head)
        first, second = front.to(tl.float32), back.to(tl.float32)
        front = (first * cos_front + second * sin_back).to(out.dtype.element_ty)
        back = (second * cos_back - first * sin_front).to(out.dtype.element_ty)
    tl.store(target, front, mask=mask)
    tl.store(target + HALF, back, mask=mask)

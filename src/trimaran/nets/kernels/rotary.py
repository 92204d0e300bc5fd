"""The way back from queries, keys and values to the one tensor that they were cut from, in one pass over memory."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

HEADS = 8  # that one program turns


def rotary_backward(queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [B, T, query | key | value], of gradients [B, heads, T, head_dim]; queries and keys turned.

    `cos` and `sin` [1 or B, 1, T, head_dim] have turned them.
    """
    batch, heads, length, head_dim = queries.shape
    wide = (heads + 2 * keys.shape[1]) * head_dim
    out = torch.empty(batch, length, wide, dtype=queries.dtype, device=queries.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    turns_row = length * head_dim if cos.shape[0] > 1 else 0
    start = 0
    for part, turned in ((queries, True), (keys, True), (values, False)):
        part = part if part.stride(-1) == 1 else part.contiguous()
        count = part.shape[1]
        _turn_back[(batch * length, triton.cdiv(count, HEADS))](
            part, out, cos, sin, start, wide, length, count, turns_row, *part.stride()[:3],
            HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2), HEADS=HEADS, TURNED=turned, num_warps=4,
        )  # fmt: skip
        start += count * head_dim
    return out


@triton.jit
def _turn_back(  # noqa: PLR0913
    part, out, cos, sin, start, wide, length, count, turns_row, of_row, of_head, of_place,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PADDED)[None, :]
    here = (head < count) & (pair < HALF)
    source = part + row * of_row + place * of_place + head * of_head + pair
    target = out + token * wide + start + head * (2 * HALF) + pair
    front = tl.load(source, mask=here)
    back = tl.load(source + HALF, mask=here)
    if TURNED:
        angle = row * turns_row + place * (2 * HALF) + pair
        known = pair < HALF
        cos_front, cos_back = tl.load(cos + angle, mask=known), tl.load(cos + angle + HALF, mask=known)
        sin_front, sin_back = tl.load(sin + angle, mask=known), tl.load(sin + angle + HALF, mask=known)
        first, second = front.to(tl.float32), back.to(tl.float32)
        front = (first * cos_front + second * sin_back).to(out.dtype.element_ty)
        back = (second * cos_back - first * sin_front).to(out.dtype.element_ty)
    tl.store(target, front, mask=here)
    tl.store(target + HALF, back, mask=here)

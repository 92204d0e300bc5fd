"""AdamW on a GPU: one pass over gradient, weight and moments, in any format, at the speed of the memory."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from trimaran.optim.block_quantization import BLOCK, codebook, edges, num_blocks
from trimaran.optim.moments import StateChunk, States

VALUES, WARPS = 2048, 8  # that one program moves, and the warps it does it with
AT_ONCE = 8  # blocks of eight-bit values


def move_on_gpu(piece: StateChunk, states: States, refused: Tensor | None) -> None:
    """Update weights and states in place, unless `refused` is not zero; see `moments.move`.

    The results are those of `moments.move` but for the last bits of single operations, which may tip a rounding. All
    tensors are contiguous and on one GPU, and nothing waits for it.
    """
    betas = piece.constants.betas
    common = (piece.weight, piece.low, piece.gradient, piece.factor, refused, piece.words)
    numbers = (betas[1], 1 - betas[0], 1 - betas[1], piece.constants.eps)
    moments = [states[key] for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale") if key in states]
    if "exp_avg_scale" in states:
        width = piece.weight.shape[1]
        count = len(piece.weight) * num_blocks(width)
        books = [one(piece.weight.device, signed=signed) for signed in (True, False) for one in (codebook, edges)]
        _move_blocks[(triton.cdiv(count, AT_ONCE),)](
            *common, *moments, *books, *numbers, count, width, AT_ONCE=AT_ONCE, BLOCK=BLOCK, num_warps=WARPS
        )
        return
    starts, length = piece.runs or (None, piece.weight.numel())
    grid = (piece.weight.numel() // length * triton.cdiv(length, VALUES),)
    _move_values[grid](*common, *moments, starts, *numbers, length, VALUES=VALUES, num_warps=WARPS)


@triton.jit
def _move_values(  # noqa: PLR0913
    weight,
    low,
    gradient,
    factor,
    refused,
    words,
    firsts,
    seconds,
    starts,
    beta2,
    rest1,
    rest2,
    eps,
    length,
    VALUES: tl.constexpr,  # noqa: N803
):
    """Move the values of one part of a run; without `starts` there is one run, and moments are kept in fp32."""
    if _goes_on(refused):
        parts = tl.cdiv(length, VALUES)
        run = tl.program_id(0) // parts
        place = (tl.program_id(0) % parts).to(tl.int64) * VALUES + tl.arange(0, VALUES)
        at, inside = run.to(tl.int64) * length + place, place < length
        slope = _slope(gradient, factor, at, inside)
        first = tl.load(firsts + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(seconds + at, mask=inside, other=0.0).to(tl.float32)
        first, second = first + (slope - first) * rest1, second * beta2 + slope * slope * rest2
        _move_weight(weight, low, words, first, second, eps, at, inside)
        if starts is None:
            tl.store(firsts + at, first, mask=inside)
            tl.store(seconds + at, second, mask=inside)
        else:
            number = tl.load(starts + run) + tl.load(words + 3) + place.to(tl.int32)
            noise = _scrambled(number.to(tl.uint32, bitcast=True))
            tl.store(firsts + at, _to_bf16(first, noise), mask=inside)
            tl.store(seconds + at, _to_bf16(second, noise >> 16), mask=inside)


@triton.jit
def _move_blocks(  # noqa: PLR0913
    weight,
    low,
    gradient,
    factor,
    refused,
    words,
    firsts,
    first_scales,
    seconds,
    second_scales,
    signed,
    signed_edges,
    unsigned,
    unsigned_edges,
    beta2,
    rest1,
    rest2,
    eps,
    count,
    width,
    AT_ONCE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Move the values of some of `count` blocks. No block crosses a row, which has `width` values."""
    if _goes_on(refused):
        block = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
        a_row = tl.cdiv(width, BLOCK)
        column = (block % a_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        at = (block // a_row).to(tl.int64)[:, None] * width + column
        there = block < count
        inside = there[:, None] & (column < width)
        slope = _slope(gradient, factor, at, inside)
        first = _restored(firsts, first_scales, signed, at, inside, block, there)
        second = _restored(seconds, second_scales, unsigned, at, inside, block, there)
        first, second = first + (slope - first) * rest1, second * beta2 + slope * slope * rest2
        _move_weight(weight, low, words, first, second, eps, at, inside)
        scale = _scale(first, inside)
        tl.store(first_scales + block, scale, mask=there)
        tl.store(firsts + at, _code(first, scale, signed_edges, 1, 127), mask=inside)
        scale = _scale(second, inside)
        tl.store(second_scales + block, scale, mask=there)
        # A second moment is never called zero, see `moments.Quantised`.
        tl.store(seconds + at, tl.maximum(_code(second, scale, unsigned_edges, 2, 0), 1), mask=inside)


@triton.jit
def _goes_on(refused):
    """Return whether the step may be taken."""
    return True if refused is None else tl.load(refused) == 0.0


@triton.jit
def _slope(gradient, factor, at, inside):
    """Return the gradient that counts, in fp32."""
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        slope = slope * tl.load(factor)
    return slope


@triton.jit
def _move_weight(weight, low, words, first, second, eps, at, inside):  # noqa: PLR0913
    """Move weights, whole or in two halves (see `optimizer.halves`), by moments that have not been rounded yet."""
    keep, size, root = _number(words), _number(words + 1), _number(words + 2)
    if low is None:
        old = tl.load(weight + at, mask=inside, other=0.0)
    else:
        upper = tl.load(weight + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(low + at, mask=inside, other=0).to(tl.int32)
        old = (((upper - (lower < 0).to(tl.int32)) << 16) | (lower & 0xFFFF)).to(tl.float32, bitcast=True)
    new = old * keep - first / (tl.sqrt(second) / root + eps) * size
    if low is None:
        tl.store(weight + at, new, mask=inside)
    else:
        bits = new.to(tl.int32, bitcast=True)
        upper = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight + at, upper, mask=inside)
        tl.store(low + at, (bits & 0xFFFF).to(tl.int16), mask=inside)


@triton.jit
def _number(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def _scrambled(number):
    """Return `rounding.scrambled` of unsigned numbers."""
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15)) * 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def _to_bf16(values, noise):
    """Return `rounding.to_bf16`."""
    bits = values.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(finite, rounded, values).to(tl.bfloat16)


@triton.jit
def _restored(codes, scales, book, at, inside, block, there):  # noqa: PLR0913
    """Return the values that codes and scales stand for, see `blocks.restored`."""
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    return tl.load(book + code) * tl.load(scales + block, mask=there, other=0.0)[:, None]


@triton.jit
def _scale(values, inside):
    """Return the largest magnitude of each block; infinity where one is no number: it shows in the next step."""
    size = tl.where(values == values, tl.abs(values), float("inf"))
    return tl.max(tl.where(inside, size, 0.0), axis=1)


@triton.jit
def _code(values, scale, edges, FINEST: tl.constexpr, ZERO: tl.constexpr):  # noqa: N803
    """Return the codes of blocks of values, see `blocks.quantised`.

    The lowest of seven decades has FINEST values, each higher one twice as many as the one below, and ZERO is the code
    of 0. So a code can be guessed without a search: a little too close to zero, so that it is right, or the next one
    is. Which it is, one look at the edge between them says.
    """
    relative = tl.div_rn(values, tl.maximum(scale, 1.1754943508222875e-38)[:, None] + tl.zeros_like(values))
    size = tl.abs(relative)
    count = tl.full(values.shape, FINEST, tl.float32)
    lift = tl.full(values.shape, 1e6, tl.float32)
    for decade in tl.static_range(6):
        edge = 10.0 ** (decade - 6) * (1 + 0.9 / (FINEST * 2**decade)) * 1.00001
        count = tl.where(size >= edge, FINEST * 2.0 ** (decade + 1), count)
        lift = tl.where(size >= edge, 10.0 ** (5 - decade), lift)
    within = (size * lift - 0.1) * (count / 0.9) - 0.01
    within = tl.minimum(tl.maximum(within, 0.0), count - 1).to(tl.int32)
    least = 0.5e-6 * (0.1 + 0.45 / FINEST) * 1.00001
    steps = tl.where(size >= least, 1 + count.to(tl.int32) - FINEST + within, 0)
    below = relative < 0
    code = tl.where(below, ZERO - steps, ZERO + steps)
    edge = tl.load(edges + tl.where(below, code, code + 1))
    return tl.where(below, code - (relative < edge).to(tl.int32), code + (relative >= edge).to(tl.int32)).to(tl.uint8)

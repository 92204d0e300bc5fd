"""Kernels over many tensors: sums of squares, checksums and sampled values. Tables have the tensors' addresses."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}

VALUES, PARTS = 2048, 8  # a program works on PARTS times VALUES values, one part after another
VALUES_PER_PROGRAM = VALUES * PARTS
NUM_WARPS = 8
PARTIALS_AT_ONCE = 1024


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):  # noqa: N803
    """Return the address as a pointer. With ALIGNED it is a multiple of 16 bytes, and wide loads are used."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["offset"])
def sum_squares(
    addresses,
    sizes,
    firsts,
    owners,
    partials,
    offset,
    DTYPE: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Store the sum of squares of one program's values, in fp32. The order of summation is always the same."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    address = tl.load(addresses + tensor)
    size = tl.where(address == 0, 0, tl.load(sizes + tensor))
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    data = pointer_to(address, DTYPE, ALIGNED)
    start = (program + offset - tl.load(firsts + tensor)).to(tl.int64) * (VALUES * PARTS)
    total = tl.zeros((VALUES,), tl.float32)
    for part in range(PARTS):
        at = start + part * VALUES + tl.arange(0, VALUES)
        values = tl.load(data + at, mask=at < size, other=0.0).to(tl.float32)
        total += values * values
    tl.store(partials + offset + program, tl.sum(total))


@triton.jit
def add_partials(partials, firsts, counts, factors, sums, BLOCK: tl.constexpr):  # noqa: N803
    """Store the sum of the partial sums of one tensor, times its factor, in fp64."""
    tensor = tl.program_id(0)
    first, count = tl.load(firsts + tensor), tl.load(counts + tensor)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partials + first + at, mask=at < count, other=0.0).to(tl.float64)
    tl.store(sums + tensor, tl.sum(total) * tl.load(factors + tensor))


@triton.jit
def sum_words(
    addresses,
    sizes,
    firsts,
    owners,
    sums,
    DTYPE: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Add one program's words, read as signed integers, to the sum of their tensor. Integers add in any order."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    data = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    size = tl.load(sizes + tensor)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * (VALUES * PARTS)
    total = tl.zeros((VALUES,), tl.int64)
    for part in range(PARTS):
        at = start + part * VALUES + tl.arange(0, VALUES)
        total += tl.load(data + at, mask=at < size, other=0).to(tl.int64)
    tl.atomic_add(sums + tensor, tl.sum(total))


@triton.jit
def gather_samples(table, samples, DTYPE: tl.constexpr, HAS_LOW: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    """Store evenly spaced values of one tensor in a row of `samples`, in fp32, and zeros after them.

    A row of the table has the addresses of weight and lower half, the stride, the number of values, and the row.
    """
    row = table + tl.program_id(0) * 5
    column = tl.arange(0, WIDTH)
    inside = column < tl.load(row + 3)
    at = column.to(tl.int64) * tl.load(row + 2)
    values = tl.load(tl.load(row).to(tl.pointer_type(DTYPE)) + at, mask=inside, other=0.0)
    if HAS_LOW:
        values = join_halves(values, tl.load(tl.load(row + 1).to(tl.pointer_type(tl.int16)) + at, mask=inside, other=0))
    tl.store(samples + tl.load(row + 4) * WIDTH + column, values.to(tl.float32))


@triton.jit
def join_halves(upper, lower):
    """Return `split_bf16.join_fp32` of two halves."""
    low = lower.to(tl.int32)
    high = upper.to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
    return ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)

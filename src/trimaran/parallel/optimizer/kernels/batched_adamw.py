"""AdamW on a GPU for many parameters in one launch. `optim.batched_update` builds the tables that it reads."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

from trimaran.parallel.batched.tensor_kernels import pointer_to
from trimaran.parallel.optimizer.kernels.adamw import (
    codes_of_blocks,
    dequantize_blocks,
    hash_bits,
    is_applied,
    round_to_bf16,
    scale_of_blocks,
    scaled_gradient,
    update_weight,
)

NUM_WARPS = 8
VALUES, PARTS = 2048, 4  # a program updates PARTS times VALUES values, one part after another
BLOCKS = 8  # of 8-bit values in a part

# The columns of the table of parameters.
WEIGHT, LOW, FIRST, FIRST_SCALE, SECOND, SECOND_SCALE = (tl.constexpr(each) for each in range(6))  # addresses
SIZE, WIDTH, STARTS, LENGTH, NAME_HASH, GROUP, PROGRAM = (tl.constexpr(each) for each in range(6, 13))
COLUMNS = tl.constexpr(13)
# The columns of the table of groups.
LR, DECAY, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, EPS = (tl.constexpr(each) for each in range(6))
GROUP_COLUMNS = tl.constexpr(6)


@triton.jit
def group_numbers(groups, row):
    """Return the factor of weight decay, beta2, 1 - beta1, 1 - beta2 and epsilon of a parameter's group, in fp32."""
    group = groups + tl.load(row + GROUP) * GROUP_COLUMNS
    decay, eps = tl.load(group + DECAY).to(tl.float32), tl.load(group + EPS).to(tl.float32)
    beta2 = tl.load(group + BETA2).to(tl.float32)
    beta1_left, beta2_left = tl.load(group + ONE_MINUS_BETA1), tl.load(group + ONE_MINUS_BETA2)
    return decay, beta2, beta1_left.to(tl.float32), beta2_left.to(tl.float32), eps


@triton.jit
def step_numbers(groups, row, corrections, tensor, count):
    """Return the learning rate over the first moment's bias correction, and the square root of the second's.

    As in `moments.step_constants`, they are computed in fp64.
    """
    lr = tl.load(groups + tl.load(row + GROUP) * GROUP_COLUMNS + LR)
    first, second = tl.load(corrections + tensor), tl.load(corrections + count + tensor)
    return (lr / first).to(tl.float32), tl.sqrt(second).to(tl.float32)


@triton.jit
def update_values(
    table,
    gradients,
    owners,
    groups,
    corrections,
    steps,
    factor,
    refused,
    count,
    GRADIENT_TYPE: tl.constexpr,  # noqa: N803
    WEIGHT_TYPE: tl.constexpr,  # noqa: N803
    HAS_LOW: tl.constexpr,  # noqa: N803
    ROUNDED: tl.constexpr,  # noqa: N803
    HAS_RUNS: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Update some values of one of `count` parameters, with moments in fp32, or in bf16 if ROUNDED.

    With HAS_RUNS, element indices are those of several runs (see `index_runs`), else of one run.
    """
    tensor = tl.load(owners + tl.program_id(0))
    gradient_address = tl.load(gradients + tensor)
    if is_applied(refused):  # noqa: SIM102 - of which Triton decides the first at compile time
        if gradient_address != 0:  # a parameter without a gradient has the address 0
            row = table + tensor * COLUMNS
            decay, beta2, one_minus_beta1, one_minus_beta2, eps = group_numbers(groups, row)
            step_size, correction = step_numbers(groups, row, corrections, tensor, count)
            gradient = pointer_to(gradient_address, GRADIENT_TYPE, ALIGNED)
            weight = pointer_to(tl.load(row + WEIGHT), WEIGHT_TYPE, ALIGNED)
            low = None
            if HAS_LOW:
                low = pointer_to(tl.load(row + LOW), tl.int16, ALIGNED)
            moment_type: tl.constexpr = tl.bfloat16 if ROUNDED else tl.float32
            firsts = pointer_to(tl.load(row + FIRST), moment_type, ALIGNED)
            seconds = pointer_to(tl.load(row + SECOND), moment_type, ALIGNED)
            size = tl.load(row + SIZE)
            if ALIGNED:
                size = tl.multiple_of(size, 16)
            start = (tl.program_id(0) - tl.load(row + PROGRAM)) * (VALUES * PARTS)
            for part in range(PARTS):
                at = start + part * VALUES + tl.arange(0, VALUES)
                inside = at < size
                grad = scaled_gradient(gradient, factor, at, inside)
                first = tl.load(firsts + at, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(seconds + at, mask=inside, other=0.0).to(tl.float32)
                first, second = first + (grad - first) * one_minus_beta1, second * beta2 + grad * grad * one_minus_beta2
                update_weight(weight, low, decay, step_size, correction, first, second, eps, at, inside)
                if ROUNDED:
                    noise = noise_of(row, steps, tensor, at, inside, HAS_RUNS)
                    tl.store(firsts + at, round_to_bf16(first, noise), mask=inside)
                    tl.store(seconds + at, round_to_bf16(second, noise >> 16), mask=inside)
                else:
                    tl.store(firsts + at, first, mask=inside)
                    tl.store(seconds + at, second, mask=inside)


@triton.jit
def noise_of(row, steps, tensor, at, inside, HAS_RUNS: tl.constexpr):  # noqa: N803
    """Return the random bits of the elements `at` in this step, as `moments.Bf16Moments` draws them."""
    step = tl.load(steps + tensor).to(tl.int32)
    offset = hash_bits((tl.load(row + NAME_HASH).to(tl.int32) + step).to(tl.uint32, bitcast=True))
    starts = tl.load(row + STARTS).to(tl.pointer_type(tl.int32))
    if HAS_RUNS:
        length = tl.load(row + LENGTH)
        number = tl.load(starts + at // length, mask=inside, other=0) + (at % length).to(tl.int32)
    else:
        number = tl.load(starts) + at.to(tl.int32)
    return hash_bits((number + offset.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True))


@triton.jit
def update_blocks(
    table,
    gradients,
    owners,
    groups,
    corrections,
    signed,
    signed_bounds,
    unsigned,
    unsigned_bounds,
    factor,
    refused,
    count,
    GRADIENT_TYPE: tl.constexpr,  # noqa: N803
    WEIGHT_TYPE: tl.constexpr,  # noqa: N803
    HAS_LOW: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Update some blocks of one of `count` parameters, with moments in 8 bits. No block crosses a row.

    With ALIGNED, rows have only whole blocks, so that the blocks are consecutive.
    """
    tensor = tl.load(owners + tl.program_id(0))
    gradient_address = tl.load(gradients + tensor)
    if is_applied(refused):  # noqa: SIM102 - of which Triton decides the first at compile time
        if gradient_address != 0:  # a parameter without a gradient has the address 0
            row = table + tensor * COLUMNS
            decay, beta2, one_minus_beta1, one_minus_beta2, eps = group_numbers(groups, row)
            step_size, correction = step_numbers(groups, row, corrections, tensor, count)
            gradient = pointer_to(gradient_address, GRADIENT_TYPE, ALIGNED)
            weight = pointer_to(tl.load(row + WEIGHT), WEIGHT_TYPE, ALIGNED)
            low = None
            if HAS_LOW:
                low = pointer_to(tl.load(row + LOW), tl.int16, ALIGNED)
            firsts = pointer_to(tl.load(row + FIRST), tl.uint8, ALIGNED)
            seconds = pointer_to(tl.load(row + SECOND), tl.uint8, ALIGNED)
            first_scales = pointer_to(tl.load(row + FIRST_SCALE), tl.float32, False)
            second_scales = pointer_to(tl.load(row + SECOND_SCALE), tl.float32, False)
            num_blocks, width = tl.load(row + SIZE), tl.load(row + WIDTH)
            start = (tl.program_id(0) - tl.load(row + PROGRAM)) * (BLOCKS * PARTS)
            for part in range(PARTS):
                block = start + part * BLOCKS + tl.arange(0, BLOCKS)
                exists = block < num_blocks
                if ALIGNED:
                    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                    inside = exists[:, None] & (tl.arange(0, BLOCK)[None, :] < BLOCK)
                else:
                    blocks_per_row = tl.cdiv(width, BLOCK)
                    column = (block % blocks_per_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
                    at = (block // blocks_per_row)[:, None] * width + column
                    inside = exists[:, None] & (column < width)
                grad = scaled_gradient(gradient, factor, at, inside)
                first = dequantize_blocks(firsts, first_scales, signed, at, inside, block, exists)
                second = dequantize_blocks(seconds, second_scales, unsigned, at, inside, block, exists)
                first, second = first + (grad - first) * one_minus_beta1, second * beta2 + grad * grad * one_minus_beta2
                update_weight(weight, low, decay, step_size, correction, first, second, eps, at, inside)
                scale = scale_of_blocks(first, inside)
                tl.store(first_scales + block, scale, mask=exists)
                tl.store(firsts + at, codes_of_blocks(first, scale, signed_bounds, 1, 127), mask=inside)
                scale = scale_of_blocks(second, inside)
                tl.store(second_scales + block, scale, mask=exists)
                # A second moment never becomes zero, see `moments.EightBitMoments`.
                codes = tl.maximum(codes_of_blocks(second, scale, unsigned_bounds, 2, 0), 1)
                tl.store(seconds + at, codes, mask=inside)

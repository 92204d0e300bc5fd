"""AdamW on a GPU, with moments in any format: a pass over a chunk of a parameter, or over many parameters at once."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from trimaran.parallel.kernels.tensor_sums import join_halves, pointer_to
from trimaran.parallel.optimizer.moments import StateChunk, States
from trimaran.parallel.optimizer.optimizer_state import BLOCK, codebook, lower_bounds, num_blocks

VALUES_PER_PROGRAM, NUM_WARPS = 2048, 8
BLOCKS_PER_PROGRAM = 8  # of 8-bit values


def update_chunk_on_gpu(chunk: StateChunk, states: States, refused: Tensor | None) -> None:
    """Update weights and states in place, unless `refused` is not zero; see `moments.update_chunk`.

    The results equal those of `moments.update_chunk` except for the last bits of single operations, which may change
    how a value is rounded. All tensors must be contiguous and on one GPU. Nothing waits for the GPU.
    """
    betas = chunk.constants.betas
    common = (chunk.weight, chunk.low, chunk.gradient, chunk.factor, refused, chunk.step_constants)
    numbers = (betas[1], 1 - betas[0], 1 - betas[1], chunk.constants.eps)
    moments = [states[key] for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale") if key in states]
    if "exp_avg_scale" in states:
        width = chunk.weight.shape[1]
        count = len(chunk.weight) * num_blocks(width)
        device = chunk.weight.device
        tables = [table(device, signed=signed) for signed in (True, False) for table in (codebook, lower_bounds)]
        _update_blocks[(triton.cdiv(count, BLOCKS_PER_PROGRAM),)](
            *common, *moments, *tables, *numbers, count, width, BLOCKS=BLOCKS_PER_PROGRAM, BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return
    starts, length = chunk.index_runs or (None, chunk.weight.numel())
    grid = (chunk.weight.numel() // length * triton.cdiv(length, VALUES_PER_PROGRAM),)
    _update_values[grid](*common, *moments, starts, *numbers, length, VALUES=VALUES_PER_PROGRAM, num_warps=NUM_WARPS)


@triton.jit
def _update_values(
    weight,
    low,
    gradient,
    factor,
    refused,
    constants,
    firsts,
    seconds,
    starts,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    length,
    VALUES: tl.constexpr,  # noqa: N803
):
    """Update some values of one index run; without `starts` there is one run, and moments are fp32."""
    if is_applied(refused):
        parts = tl.cdiv(length, VALUES)
        run = tl.program_id(0) // parts
        position = (tl.program_id(0) % parts).to(tl.int64) * VALUES + tl.arange(0, VALUES)
        at, inside = run.to(tl.int64) * length + position, position < length
        grad = scaled_gradient(gradient, factor, at, inside)
        first = tl.load(firsts + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(seconds + at, mask=inside, other=0.0).to(tl.float32)
        first, second = first + (grad - first) * one_minus_beta1, second * beta2 + grad * grad * one_minus_beta2
        decay, size, correction = float_of(constants), float_of(constants + 1), float_of(constants + 2)
        update_weight(weight, low, decay, size, correction, first, second, eps, at, inside)
        if starts is None:
            tl.store(firsts + at, first, mask=inside)
            tl.store(seconds + at, second, mask=inside)
        else:
            number = tl.load(starts + run) + tl.load(constants + 3) + position.to(tl.int32)
            noise = hash_bits(number.to(tl.uint32, bitcast=True))
            tl.store(firsts + at, round_to_bf16(first, noise), mask=inside)
            tl.store(seconds + at, round_to_bf16(second, noise >> 16), mask=inside)


@triton.jit
def _update_blocks(
    weight,
    low,
    gradient,
    factor,
    refused,
    constants,
    firsts,
    first_scales,
    seconds,
    second_scales,
    signed,
    signed_bounds,
    unsigned,
    unsigned_bounds,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    count,
    width,
    BLOCKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update the values of some of `count` blocks. A row has `width` values, and no block crosses a row."""
    if is_applied(refused):
        block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        blocks_per_row = tl.cdiv(width, BLOCK)
        column = (block % blocks_per_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        at = (block // blocks_per_row).to(tl.int64)[:, None] * width + column
        exists = block < count
        inside = exists[:, None] & (column < width)
        grad = scaled_gradient(gradient, factor, at, inside)
        first = dequantize_blocks(firsts, first_scales, signed, at, inside, block, exists)
        second = dequantize_blocks(seconds, second_scales, unsigned, at, inside, block, exists)
        first, second = first + (grad - first) * one_minus_beta1, second * beta2 + grad * grad * one_minus_beta2
        decay, size, correction = float_of(constants), float_of(constants + 1), float_of(constants + 2)
        update_weight(weight, low, decay, size, correction, first, second, eps, at, inside)
        store_blocks(firsts, first_scales, signed_bounds, first, at, inside, block, exists, 1, 127)
        store_blocks(seconds, second_scales, unsigned_bounds, second, at, inside, block, exists, 2, 0)


@triton.jit
def is_applied(refused):
    return True if refused is None else tl.load(refused) == 0.0


@triton.jit
def scaled_gradient(gradient, factor, at, inside):
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        grad = grad * tl.load(factor)
    return grad


@triton.jit
def update_weight(weight, low, decay, size, correction, first, second, eps, at, inside):
    """Update weights, in fp32 or two halves (see `split_weights`), with moments that have not been rounded yet."""
    if low is None:
        old = tl.load(weight + at, mask=inside, other=0.0)
    else:
        upper, lower = tl.load(weight + at, mask=inside, other=0.0), tl.load(low + at, mask=inside, other=0)
        old = join_halves(upper, lower)
    new = old * decay - first / (tl.sqrt(second) / correction + eps) * size
    if low is None:
        tl.store(weight + at, new, mask=inside)
    else:
        bits = new.to(tl.int32, bitcast=True)
        upper = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight + at, upper, mask=inside)
        tl.store(low + at, (bits & 0xFFFF).to(tl.int16), mask=inside)


@triton.jit
def float_of(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def hash_bits(number):
    """Return `stochastic_rounding.hash_int32` of unsigned numbers."""
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15)) * 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def round_to_bf16(values, noise):
    """Return `stochastic_rounding.to_bf16`."""
    bits = values.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(finite, rounded, values).to(tl.bfloat16)


@triton.jit
def dequantize_blocks(codes, scales, book, at, inside, block, exists):
    """Return the values of codes and scales, see `block_quantization.dequantize`."""
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    return tl.load(book + code) * tl.load(scales + block, mask=exists, other=0.0)[:, None]


@triton.jit
def store_blocks(codes, scales, bounds, values, at, inside, block, exists, FINEST: tl.constexpr, ZERO: tl.constexpr):  # noqa: N803
    """Store moments as codes and scales. A scale is the largest magnitude of a block, Inf if it has a NaN.

    The NaN then shows in the next step.
    """
    size = tl.where(values == values, tl.abs(values), float("inf"))
    scale = tl.max(tl.where(inside, size, 0.0), axis=1)
    tl.store(scales + block, scale, mask=exists)
    code = codes_of_blocks(values, scale, bounds, FINEST, ZERO)
    if ZERO == 0:  # a second moment never becomes zero, see `moments.EightBitMoments`
        code = tl.maximum(code, 1)
    tl.store(codes + at, code, mask=inside)


@triton.jit
def codes_of_blocks(values, scale, bounds, FINEST: tl.constexpr, ZERO: tl.constexpr):  # noqa: N803
    """Return the codes of blocks of values, see `block_quantization.quantize`.

    The lowest of seven decades has FINEST values, each higher one twice as many as the one below, and ZERO is the code
    of 0. So a code can be computed without a search, rounded towards zero: it or the next one is right. One comparison
    with the bound between the two decides.
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
    bound = tl.load(bounds + tl.where(below, code, code + 1))
    return tl.where(below, code - (relative < bound).to(tl.int32), code + (relative >= bound).to(tl.int32)).to(tl.uint8)


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
                store_blocks(firsts, first_scales, signed_bounds, first, at, inside, block, exists, 1, 127)
                store_blocks(seconds, second_scales, unsigned_bounds, second, at, inside, block, exists, 2, 0)

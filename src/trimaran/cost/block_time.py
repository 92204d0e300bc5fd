"""Compute time of one block on one rank: its matmuls, its attention, and the memory traffic of its other operators."""

import math
import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import RECOMPUTED_BY_OPERATOR, Flops, Plan
from trimaran.cost.job import FP32_BYTES, Job, chunk_rows
from trimaran.cost.rank_part import PACKED_BYTES, packed_linears
from trimaran.cost.roofline import DeviceRates, attention_seconds, matmul_seconds, power_factor, rates_for_weight
from trimaran.cost.stack_profiles import EAGER_JOINT, ElementwiseBytes, TimeProfile
from trimaran.models import Opaque, OutlineLayer, Tower

GELU_BYTES = 4  # moved per feature of a feed-forward without a gate: read 2, write 2


# Of the rate of an attention without a bias: cuDNN's kernels of a perception model's fusion on one H200.
BIASED_ATTENTION_RATE = 0.7
# Bytes per second that one multiprocessor reads alone, for a row of a norm: GroupNorm on one H200, two shapes.
NORM_ROW_BANDWIDTH = 4.9e9
# Of the memory's bandwidth: casts, changes of layout and strided copies beside convolutions on one H200.
STRIDED_BANDWIDTH_FRACTION = 0.45
# Bytes moved per score by eager attention, in forward and backward (counted): the product (2), the mask (4), the
# softmax in fp32 (2 + 4 + 4 + 4), the cast (6), the product with the values (2); and the gradients of all of them.
EAGER_SCORE_BYTES = (28, 42)
# Bytes moved per element by dropout, in forward and in backward alike: two 16-bit tensors and a mask of a byte.
DROPOUT_BYTES = 5
# Bytes moved per logit by our fused loss kernel: it reads a logit twice and overwrites it with its gradient.
FUSED_LOGIT_BYTES = 6
# A chunked loss adds each chunk's weight gradient to an fp32 sum. This fraction of that traffic is not hidden by the
# matmul: 5.0 ms per step more than with all logits at once, for 16 chunks of 1B's head on one H200.
EXPOSED_SUM_FRACTION = 0.4
# Ring attention: the fraction of a rank's queries that attend to the keys of another rank, on average, and the bytes
# moved per element of their outputs to merge them, and to add up their gradients: 17.8 and 44.7 ms against 15.0 and
# 39.5 with gathered keys, for 65,536 positions of 32 heads on 8 ranks (one H200, without communication).
RING_QUERIES, MERGED_BYTES, ADDED_BYTES = 0.75, 60, 110
# Gathered keys of documents need a mask, with which every pair is computed: 26.7 and 75.0 ms for the same shapes.
MASKED_FORWARD, MASKED_BACKWARD = 1.8, 1.9


class BlockSplit(NamedTuple):
    """One rank's part of a layer: its positions, the sequence length, and the degrees that split the weights.

    ampere_attention: cuDNN has no kernel for the mask, so torch takes FlashAttention 2: queries that are only some of
        the sequence's positions and attend to gathered keys, and documents or images of different lengths.
    ring: ranks whose keys are attended to one after the other, each time with FlashAttention 2; 1 if all at once.
    """

    positions: int
    length: int
    tp: int
    ep: int
    ampere_attention: bool = False
    ring: int = 1
    is_masked: bool = False  # gathered keys are those of several documents


class BlockKind(NamedTuple):
    """How a block runs. `fp8`: the recipe of its scales, if any. `joint`: projections of one input are one matmul."""

    compiled: bool
    fp8: str = ""
    joint: bool = False


EAGER = BlockKind(compiled=False)


class Fp8Cost(NamedTuple):
    """What a recipe of fp8 scales costs, over one scale a tensor: factors on matmuls and on the bytes of the casts."""

    matmul: float = 1.0
    cast: float = 1.0


# `block`: three matmuls of 8192 x 4096 x 14336 took 2.48 ms instead of 2.04 on one H200 (torch 2.11, cuBLAS 13.0), and
# its casts by kernels 1.0 ms instead of 0.3 to 0.5. `mx` is cast by compiled operators, which took 1.8 ms for `block`;
# its matmuls are assumed to be those of one scale a tensor.
FP8_COSTS = {"": Fp8Cost(), "tensor": Fp8Cost(), "block": Fp8Cost(1.22, 2.1), "mx": Fp8Cost(1.0, 3.8)}


class Passes(NamedTuple):
    """Seconds of a block for one micro-batch. The modes of recompute are what they add to backward.

    Adapters are part of all but `weight_grad`, which is of the block's own weights.
    """

    forward: float
    input_grad: float
    weight_grad: float
    full: float = 0.0
    selective: float = 0.0
    elementwise: float = 0.0
    adapter_grad: float = 0.0


class Matmul(NamedTuple):
    """A matmul of all positions with a weight. `is_saved`: selective recompute saves its output."""

    rows: int
    columns: int
    depth: int
    groups: int = 1
    is_saved: bool = False


@lru_cache(maxsize=1 << 15)
def layer_passes(
    layer: OutlineLayer, split: BlockSplit, rates: DeviceRates, profile: TimeProfile, *, kind: BlockKind
) -> Passes:
    """Return the times of a transformer block."""
    forward = input_grad = weight_grad = unsaved = matmul = casts = grad_casts = 0.0
    cost = FP8_COSTS[kind.fp8]
    for rows, columns, depth, groups, is_saved in matmuls(
        layer, split, profile.comm.expert_imbalance, joint=kind.joint and layer.operators is None
    ):
        own = rates_for_weight(columns, depth, rates)
        matmul = cost.matmul * matmul_seconds(rows, columns, depth, own, groups=groups)
        forward += matmul
        input_grad += cost.matmul * matmul_seconds(rows, depth, columns, own, groups=groups)
        weight_grad += cost.matmul * matmul_seconds(depth, columns, rows, own, groups=groups)
        unsaved += 0.0 if is_saved else matmul
        if kind.fp8:
            inputs, weights, gradients = (profile.compiled if kind.compiled else profile.eager).fp8_cast
            casts += cost.cast * groups * (inputs * rows + weights * columns) * depth / rates.bandwidth
            grad_casts += cost.cast * gradients * groups * rows * columns / rates.bandwidth
    traffic = _traffic(layer, rates, profile, kind)
    elementwise = elementwise_bytes(layer, split, rates, profile, kind=kind) / rates.bandwidth
    attention, attention_backward = layer_attention(layer, split, rates, profile)
    others = (1 + traffic.backward) * elementwise + attention + attention_backward + casts + grad_casts
    slower = power_factor(forward + input_grad + weight_grad, others, rates)
    forward, input_grad, weight_grad = slower * forward + casts, slower * input_grad + grad_casts, slower * weight_grad
    unsaved, matmul = slower * unsaved, slower * matmul
    selective = elementwise + unsaved if profile.recompute == "torch" else attention
    forward += elementwise + attention
    full = forward - matmul if profile.recompute == "torch" else forward  # backward does not need the last matmul
    input_grad = input_grad + traffic.backward * elementwise + attention_backward
    passes = Passes(forward, input_grad, weight_grad, full, selective, elementwise)
    return passes if layer.adapter is None else _with_adapters(passes, layer, split, rates)


def _with_adapters(passes: Passes, layer: OutlineLayer, split: BlockSplit, rates: DeviceRates) -> Passes:
    """Return the times with those of the layer's adapters, and with the time to unpack 4-bit weights.

    At small ranks an adapter's matmuls only move its input and its output. The matmul of the update adds it to the
    output of the frozen layer, which it reads; backward adds the gradient of the input to that of the frozen layer.
    """
    adapter, rows, per_byte = layer.adapter, split.positions, rates.element_bytes / rates.bandwidth
    assert adapter is not None
    rank, forward, input_grad, weight_grad = adapter.rank, 0.0, 0.0, 0.0
    for linear in layer.adapted_linears:
        inputs, outputs = linear.on_rank(split.tp)
        forward += matmul_seconds(rows, rank, inputs, rates) + matmul_seconds(rows, outputs, rank, rates)
        forward += rows * outputs * per_byte
        input_grad += matmul_seconds(rows, rank, outputs, rates) + matmul_seconds(rows, inputs, rank, rates)
        input_grad += 3 * rows * inputs * per_byte
        weight_grad += matmul_seconds(outputs, rank, rows, rates) + matmul_seconds(rank, inputs, rows, rates)
        if adapter.has_dropout:
            forward += DROPOUT_BYTES * rows * inputs / rates.bandwidth
            input_grad += DROPOUT_BYTES * rows * inputs / rates.bandwidth
        if adapter.has_magnitude:  # the norm of each row, then two more elementwise operators on the output
            forward += (2 * inputs * outputs + 4 * rows * outputs) * per_byte
            input_grad += 5 * rows * outputs * per_byte
    weights = sum(math.prod(linear.on_rank(split.tp)) for linear in packed_linears(layer))
    unpack = (PACKED_BYTES + rates.element_bytes) * weights / rates.bandwidth
    forward, input_grad = forward + unpack, input_grad + unpack
    more = Passes(forward, input_grad, 0.0, forward, forward, forward, weight_grad)
    return Passes(*map(operator.add, passes, more))


def head_passes(tower: Tower, split: BlockSplit, rates: DeviceRates, profile: TimeProfile) -> Passes:
    """Return the times of the head and a loss on full logits. They are never recomputed."""
    columns, rates = tower.head_rows(split.tp), rates._replace(matmul_flops=rates.head_matmul_flops)
    matmul = matmul_seconds(split.positions, columns, tower.hidden, rates)
    logits = split.positions * columns * profile.moved_logit_bytes / rates.bandwidth
    input_grad = matmul_seconds(split.positions, tower.hidden, columns, rates)
    weight_grad = matmul_seconds(tower.hidden, columns, split.positions, rates)
    return Passes(matmul + logits / 2, input_grad + logits / 2, weight_grad)


def fused_passes(tower: Tower, split: BlockSplit, rates: DeviceRates, *, chunked: bool) -> Passes:
    """Return the times of a head with a fused loss: it computes the gradients in forward, at once or in chunks.

    Each chunk adds to the gradient of the head's weight in fp32. Backward only scales the gradients.
    """
    rates = rates._replace(matmul_flops=rates.head_matmul_flops)
    outputs, hidden, rows = tower.outputs, tower.hidden, split.positions
    at_once = chunk_rows(rows, outputs, rates.element_bytes) if chunked else rows
    chunks = -(-rows // at_once)
    matmul = chunks * matmul_seconds(at_once, outputs, hidden, rates)
    input_grad = chunks * matmul_seconds(at_once, hidden, outputs, rates)
    weight_grad = chunks * matmul_seconds(hidden, outputs, at_once, rates)
    logits = FUSED_LOGIT_BYTES * rows * outputs / rates.bandwidth
    if chunks > 1:
        weight_grad += EXPOSED_SUM_FRACTION * 2 * FP32_BYTES * chunks * tower.head_parameters / rates.bandwidth
    scaling = 2 * rates.element_bytes * (tower.head_parameters + rows * hidden) / rates.bandwidth
    return Passes(matmul + logits + input_grad, scaling, weight_grad)


def context_copy_seconds(
    layer: OutlineLayer, positions: int, rates: DeviceRates, *, cp: int, tp: int, context: str
) -> tuple[float, float]:
    """Return the times of the strided copies around attention whose sequence is split over `cp` ranks.

    Counted in `parallel/axes/cp.py`. Gathered keys and values are put in order and repeated for each query head.
    Backward fills and adds a full-length gradient of them for each of the rank's two chunks. An exchange copies
    queries, keys, values and the output before and after. What a ring merges is in `layer_attention`.
    """
    if cp == 1 or not layer.heads or not rates.traits.has_kernels or context == "ring":
        return 0.0, 0.0
    element = rates.element_bytes * positions / tp
    query, keys = layer.heads * layer.value_dim * element, layer.kv_heads * layer.head_dim * element
    if context == "gather":
        keys, repeated = cp * keys, cp * query
        moved = 2 * (5 * keys + repeated) + 2 * query, 2 * (5 * keys + (6 + 2 + 1 / cp) * repeated) + 2 * query
    else:
        moved = (8 * query + 8 * keys,) * 2
    forward, backward = (each / (STRIDED_BANDWIDTH_FRACTION * rates.bandwidth) for each in moved)
    return forward, backward


def opaque_passes(block: Opaque, samples: int, rates: DeviceRates) -> Passes:
    """Return the times of an opaque block: its FLOPs or its memory traffic, whichever takes longer.

    A block with norms over large groups has kernels for either, and rows that are read one after another.
    """
    flops, moved = samples * block.sample_flops / rates.matmul_flops, samples * block.moved_bytes / rates.bandwidth
    forward = max(flops, moved)
    if block.norm_row_bytes and rates.traits.has_kernels:
        forward = flops + moved / STRIDED_BANDWIDTH_FRACTION
    passes = Passes(forward, forward, forward, forward, forward, forward)
    rows = block.norm_row_bytes / NORM_ROW_BANDWIDTH if rates.traits.has_kernels else 0.0
    return passes._replace(forward=forward + rows, full=forward + rows) if rows else passes


def matmuls(layer: OutlineLayer, split: BlockSplit, imbalance: float = 1.0, *, joint: bool = False) -> Iterator[Matmul]:
    """Yield the matmuls of a layer's forward on one rank, in order.

    `imbalance`: tokens of the busiest expert-parallel rank, relative to the mean.
    `joint`: queries, keys and values are one matmul, and so are gate and up, except those of experts.
    """
    rows, hidden, tp = split.positions, layer.hidden, split.tp
    if layer.joining_weights:  # of each rank's own part of the sequence
        yield Matmul(max(1, rows // tp), hidden, 2 * hidden)
    if layer.heads and joint and layer.latent is None:
        yield Matmul(rows, (layer.heads + 2 * layer.kv_heads) * layer.head_dim, hidden)
        yield Matmul(rows, hidden, layer.heads * layer.value_dim, is_saved=True)
    elif layer.heads:
        query, output = layer.heads * layer.head_dim // tp, layer.heads * layer.value_dim // tp
        if (latent := layer.latent) is None:
            keys = max(1, layer.kv_heads // tp) * layer.head_dim
            yield Matmul(rows, query, hidden)
            yield Matmul(rows, keys, hidden, is_saved=True)
            yield Matmul(rows, keys, hidden)
        else:
            if latent.query_rank:
                yield Matmul(rows, latent.query_rank, hidden)
            yield Matmul(rows, query, latent.query_rank or hidden, is_saved=True)
            yield Matmul(rows, latent.kv_rank + latent.rope_dim, hidden)
            widened = layer.heads * (layer.head_dim - latent.rope_dim + latent.value_dim) // tp
            yield Matmul(rows, widened, latent.kv_rank, is_saved=True)
        yield Matmul(rows, hidden, output, is_saved=True)
    if (experts := layer.experts) is None:
        ffns = ((rows, layer.ffn // tp, 1),)
    else:
        yield Matmul(rows, experts.num_experts, hidden)
        num_here = max(1, experts.num_experts // split.ep)
        tokens_each = max(1, int((imbalance if split.ep > 1 else 1.0) * rows * experts.top_k / num_here))
        ffns = ((tokens_each, experts.ffn // tp, num_here), (rows, experts.shared_ffn // tp, 1))
    for tokens, ffn, groups in ffns:
        if ffn:
            is_joint = joint and layer.gated and layer.experts is None
            yield Matmul(tokens, 2 * ffn if is_joint else ffn, hidden, groups)
            if layer.gated and not is_joint:
                yield Matmul(tokens, ffn, hidden, groups, is_saved=True)
            yield Matmul(tokens, hidden, ffn, groups, is_saved=True)  # backward does not need its output


def layer_attention(
    layer: OutlineLayer, split: BlockSplit, rates: DeviceRates, profile: TimeProfile
) -> tuple[float, float]:
    """Return the times of a layer's attention without its projections, forward and backward."""
    if not layer.heads:
        return 0.0, 0.0
    flops = 2.0 * split.positions * layer.heads / split.tp * (layer.head_dim + layer.value_dim)
    flops *= layer.mean_attended_keys(split.length)
    is_ampere = split.ampere_attention or split.ring > 1
    kernel = "flash-2" if is_ampere and profile.attention == "torch" else profile.attention
    length = min(split.length, layer.window) if layer.window and not layer.causal else split.length
    if layer.operators and layer.operators.biased and rates.traits.has_kernels:
        flops /= BIASED_ATTENTION_RATE
    if layer.operators and layer.operators.keeps_scores and rates.cpu is None:
        # Operators of its own for scores, mask, softmax and cast, over all pairs.
        scores = split.positions * split.length * layer.heads / split.tp
        matmul = 2.0 * scores * (layer.head_dim + layer.value_dim) / rates.matmul_flops
        forward, backward = (moved * scores / rates.bandwidth for moved in EAGER_SCORE_BYTES)
        return matmul + forward, 2 * matmul + backward
    forward, backward = attention_seconds(flops, length, layer.head_dim, kernel=kernel, rates=rates)
    if split.is_masked:
        forward, backward = MASKED_FORWARD * forward, MASKED_BACKWARD * backward
    merged = (split.ring - 1) * RING_QUERIES * split.positions * layer.heads / split.tp * layer.value_dim
    return forward + merged * MERGED_BYTES / rates.bandwidth, backward + merged * ADDED_BYTES / rates.bandwidth


def _traffic(layer: OutlineLayer, rates: DeviceRates, profile: TimeProfile, kind: BlockKind) -> ElementwiseBytes:
    """Return the elementwise traffic of a layer's kernels."""
    if kind.compiled:
        return profile.compiled
    is_joint = kind.joint and layer.operators is None and not layer.qk_norm and layer.experts is None
    return EAGER_JOINT if is_joint and rates.traits.has_kernels else profile.eager


def elementwise_bytes(
    layer: OutlineLayer, split: BlockSplit, rates: DeviceRates, profile: TimeProfile, *, kind: BlockKind
) -> float:
    """Return the bytes that the elementwise operators of a forward move.

    Rotary embeddings are assumed where there is a gate: GPT blocks have neither.
    Norms and rotary embeddings run in fp32 in every precision, so fp32 makes only the gate more expensive.
    A norm of queries and keys moves about a third of what two norms and two residual additions move.
    Tensor parallelism splits all of it, but the residual stream only with sequence parallelism.
    """
    elementwise = _traffic(layer, rates, profile, kind)
    operators = layer.operators if not kind.compiled and rates.traits.has_kernels else None
    plain = operators.activation_bytes if operators else GELU_BYTES
    gate = (elementwise.gate if layer.gated else plain) * (2 if rates.element_bytes == 4 else 1)
    is_rotary = operators.rotary if operators else layer.gated
    rotary = elementwise.rotary * is_rotary + elementwise.residual / 3 * layer.qk_norm
    moved = rotary * (layer.heads + layer.kv_heads) * layer.head_dim + gate * layer.active_ffn
    if layer.experts:
        moved += elementwise.routed * layer.experts.top_k * layer.hidden
    residual = (operators.residual_bytes if operators else 0) or elementwise.residual
    stream = residual * layer.hidden / (split.tp if profile.comm.splits_sequence else 1)
    return split.positions * (moved / split.tp + stream)


def repeated_flops(job: Job, plan: Plan) -> Flops:
    """Return the FLOPs that one step of the whole cluster repeats in backward.

    A tower without gradients repeats nothing, and neither do head and loss.
    """
    total = 0.0
    for tower in job.outline.towers:
        recompute = job.recompute_of(tower, plan)
        if recompute != "none" and job.outline.passes(tower) > 1:
            total += _tower_flops(tower, recompute, job.seq_len, job.stack.time)
    return Flops(plan.global_batch * total)


@lru_cache(maxsize=4096)  # many plans of a search share one recompute mode
def _tower_flops(tower: Tower, recompute: str | int, seq_len: int, profile: TimeProfile) -> float:
    """Return the repeated FLOPs of one sample. A number k means every k-th block, from the first on."""
    positions, length = tower.sample_positions(seq_len)
    blocks = [block for block, count in tower.runs for _ in range(count)]
    stride, total = recompute if isinstance(recompute, int) else 1, 0.0
    for block in blocks[::stride]:
        forward = float(block.flops(positions, length))
        if isinstance(block, Opaque):
            total += forward
            continue
        block_matmuls = list(matmuls(block, BlockSplit(positions, length, tp=1, ep=1)))
        flops = [2.0 * each.rows * each.columns * each.depth * each.groups for each in block_matmuls]
        if profile.recompute == "complete":  # attention only, or everything
            total += max(0.0, forward - sum(flops)) if recompute == "selective" else forward
        elif recompute in RECOMPUTED_BY_OPERATOR:
            unsaved = [num for num, each in zip(flops, block_matmuls, strict=True) if not each.is_saved]
            total += 2.0 * positions * block.adapter_parameters() + (sum(unsaved) if recompute == "selective" else 0.0)
        else:  # torch stops before the last matmul, whose output backward does not need
            total += forward - sum(flops[-1:])
    return total

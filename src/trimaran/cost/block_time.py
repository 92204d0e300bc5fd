"""How long one block computes on one rank: its products, its attention, and the bytes of everything between them."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.cost.loss_kind import SUM_BYTES, piece_rows
from trimaran.cost.roofline import DeviceRates, attention_seconds, product_seconds
from trimaran.cost.time_profiles import TimeProfile
from trimaran.models import Opaque, OutlineLayer, Tower

GELU_BYTES = 4  # a feature of a feed-forward without a gate: read 2, write 2
BACKWARD_MOVES = 1.6  # times forward's bytes: whole steps on an H200, eager and compiled
IMBALANCE = 1.2  # how much more than its share the busiest rank of a mixture gets; 1 where all experts are on it
# Casting a product's operands to fp8: a maximum is found (read 2), then the cast (read 2, write 1), in two layouts.
CAST_BYTES = 6
# Of a fused loss: our kernel reads a score twice and writes its gradient in its place, 16 bits each.
SCORE_BYTES = 6
# Of what moves when a piece of a chunked loss is added to the gradient in fp32, the share that its product does not
# hide: 5.0 ms a step more than with all logits at once, 16 pieces of 1B's head on one H200.
SUM_SHARE = 0.4


class BlockSplit(NamedTuple):
    """What one rank gets of a layer: its positions, how long the sequences are, and by how much weights are cut."""

    positions: int
    length: int
    tp: int
    ep: int


class Passes(NamedTuple):
    """Seconds of a block's passes over one micro-batch; `full` and `selective` recompute repeat so much of forward."""

    forward: float
    to_input: float
    to_weights: float
    full: float
    selective: float


class Matmul(NamedTuple):
    """A product of every position with a weight. `is_kept`: selective recompute keeps what it returns."""

    rows: int
    columns: int
    depth: int
    groups: int = 1
    is_kept: bool = False


@lru_cache(maxsize=1 << 15)
def layer_passes(
    layer: OutlineLayer, cut: BlockSplit, rates: DeviceRates, profile: TimeProfile, *, compiled: bool, fp8: bool
) -> Passes:
    """Return how long a transformer block takes; tensor parallelism cuts what lies between products as well."""
    forward = to_input = to_weights = again = there = 0.0
    for rows, columns, depth, groups, is_kept in products(layer, cut):
        there = product_seconds(rows, columns, depth, rates, groups=groups)
        forward += there
        to_input += product_seconds(rows, depth, columns, rates, groups=groups)
        to_weights += product_seconds(depth, columns, rows, rates, groups=groups)
        again += 0.0 if is_kept else there
        if fp8:
            forward += CAST_BYTES * groups * (rows + columns) * depth / rates.stream
            to_input += 2 * CAST_BYTES * groups * rows * columns / rates.stream
    moved = _moved_bytes(layer, cut, rates, profile, compiled=compiled) / rates.stream
    sees, sees_back = _attention(layer, cut, rates, profile)
    selective = moved + again if profile.recompute == "torch" else sees
    forward += moved + sees
    full = forward - there if profile.recompute == "torch" else forward  # the last product is nobody's input
    return Passes(forward, to_input + BACKWARD_MOVES * moved + sees_back, to_weights, full, selective)


def head_passes(tower: Tower, cut: BlockSplit, rates: DeviceRates, profile: TimeProfile) -> Passes:
    """Return how long the head and the loss take; they are never computed again."""
    columns, rates = tower.outputs // cut.tp, rates._replace(products=rates.head_products)
    there = product_seconds(cut.positions, columns, tower.hidden, rates)
    scores = cut.positions * columns * profile.logit_bytes / rates.stream
    to_input = product_seconds(cut.positions, tower.hidden, columns, rates)
    to_weights = product_seconds(tower.hidden, columns, cut.positions, rates)
    return Passes(there + scores / 2, to_input + scores / 2, to_weights, 0.0, 0.0)


def fused_passes(tower: Tower, cut: BlockSplit, rates: DeviceRates, *, chunked: bool) -> Passes:
    """Return how long the head takes whose loss is fused with it: gradients follow scores at once, all or in pieces.

    Each piece adds to the gradient of the head's weight, in fp32. Backward only scales what is there.
    """
    rates, outputs, hidden, rows = (
        rates._replace(products=rates.head_products),
        tower.outputs,
        tower.hidden,
        cut.positions,
    )
    each = piece_rows(rows, outputs, rates.width) if chunked else rows
    pieces = -(-rows // each)
    there = pieces * product_seconds(each, outputs, hidden, rates)
    to_input = pieces * product_seconds(each, hidden, outputs, rates)
    to_weights = pieces * product_seconds(hidden, outputs, each, rates)
    scores = SCORE_BYTES * rows * outputs / rates.stream
    if pieces > 1:
        to_weights += SUM_SHARE * 2 * SUM_BYTES * pieces * tower.head_parameters / rates.stream
    scaled = 2 * rates.width * (tower.head_parameters + rows * hidden) / rates.stream
    return Passes(there + scores + to_input, scaled, to_weights, 0.0, 0.0)


def opaque_passes(block: Opaque, samples: int, rates: DeviceRates) -> Passes:
    """Return how long a block takes of which only totals are known: its arithmetic or its bytes, whichever is more."""
    forward = max(block.sample_flops / rates.products, block.moved_bytes / rates.stream) * samples
    return Passes(forward, forward, forward, forward, forward)


def products(layer: OutlineLayer, cut: BlockSplit) -> Iterator[Matmul]:
    """Yield the products of a layer's forward on one rank, in their order."""
    rows, hidden, tp = cut.positions, layer.hidden, cut.tp
    if layer.heads:
        yield from _attention_products(layer, cut)
    wide = 2 if layer.gated else 1
    if (experts := layer.experts) is None:
        ffns = ((rows, layer.ffn // tp, 1),)
    else:
        yield Matmul(rows, experts.num_experts, hidden)
        here = max(1, experts.num_experts // cut.ep)
        busiest = IMBALANCE if cut.ep > 1 else 1.0
        each = max(1, int(busiest * rows * experts.top_k / here))
        ffns = ((each, experts.ffn // tp, here), (rows, experts.shared_ffn // tp, 1))
    for tokens, ffn, groups in ffns:
        if ffn:
            yield Matmul(tokens, ffn, hidden, groups)
            if wide == 2:
                yield Matmul(tokens, ffn, hidden, groups, is_kept=True)
            yield Matmul(tokens, hidden, ffn, groups, is_kept=True)  # the last, which no backward needs


def _attention_products(layer: OutlineLayer, cut: BlockSplit) -> Iterator[Matmul]:
    rows, hidden, tp = cut.positions, layer.hidden, cut.tp
    query, output = layer.heads * layer.head_dim // tp, layer.heads * layer.value_dim // tp
    if (latent := layer.latent) is None:
        keys = max(1, layer.kv_heads // tp) * layer.head_dim
        yield Matmul(rows, query, hidden)
        yield Matmul(rows, keys, hidden, is_kept=True)
        yield Matmul(rows, keys, hidden)
    else:
        if latent.query_rank:
            yield Matmul(rows, latent.query_rank, hidden)
        yield Matmul(rows, query, latent.query_rank or hidden, is_kept=True)
        yield Matmul(rows, latent.kv_rank + latent.rope_dim, hidden)
        widened = layer.heads * (layer.head_dim - latent.rope_dim + latent.value_dim) // tp
        yield Matmul(rows, widened, latent.kv_rank, is_kept=True)
    yield Matmul(rows, hidden, output, is_kept=True)


def _attention(layer: OutlineLayer, cut: BlockSplit, rates: DeviceRates, profile: TimeProfile) -> tuple[float, float]:
    if not layer.heads:
        return 0.0, 0.0
    flops = 2.0 * cut.positions * layer.heads / cut.tp * (layer.head_dim + layer.value_dim) * layer.seen(cut.length)
    return attention_seconds(flops, cut.length, layer.head_dim, kernel=profile.attention, rates=rates)


def _moved_bytes(
    layer: OutlineLayer, cut: BlockSplit, rates: DeviceRates, profile: TimeProfile, *, compiled: bool
) -> float:
    """Return what a forward's elementwise operators move. Rotary positions came with gates: GPT's blocks have neither.

    Norms and rotary positions are computed in fp32 in any precision, so fp32 makes only the gate dearer. A norm of
    queries and keys is about a third of what the stream has for two norms and two residuals.
    """
    traffic = profile.compiled if compiled else profile.eager
    gate = (traffic.gate if layer.gated else GELU_BYTES) * (2 if rates.width == 4 else 1)
    turned = (traffic.rotary * layer.gated + traffic.stream / 3 * layer.qk_norm) * (layer.heads + layer.kv_heads)
    moved = traffic.stream * layer.hidden + turned * layer.head_dim + gate * layer.active_ffn
    if layer.experts:
        moved += traffic.routed * layer.experts.top_k * layer.hidden
    return cut.positions * moved / cut.tp

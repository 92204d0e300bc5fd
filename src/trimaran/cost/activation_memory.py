"""What forward keeps for backward: bytes of one position in one layer, operator by operator, and of a whole rank."""

from functools import lru_cache
from typing import NamedTuple

from trimaran.cost.memory_inputs import MemoryInputs
from trimaran.cost.memory_profiles import JOINT, Saved
from trimaran.cost.rank_part import LayerSlice, RankPart
from trimaran.models import OutlineLayer, Tower

# Tensors as wide as the feed-forward that its backward holds besides what was kept: gradients of what it multiplies and
# of their product; where products are joint, also what it computes again. What others hold was fitted as a whole.
BACK = (3, 4)


class LayerBytes(NamedTuple):
    """Bytes of one position: all that a layer keeps, and what is left by each way to compute it again."""

    none: float
    selective: float
    full: float


class SavedActivations(NamedTuple):
    """Bytes of one micro-batch on a rank: what all layers keep, and one of them; one that is computed again.

    `casts` are 16-bit copies of whole weights that autocast keeps from forward to backward, but of layers that are
    computed again; `passing` is what slices exchange, `back` the gradients inside the layer at work in backward: of the
    stream, and of what a feed-forward multiplies.
    """

    layers: float = 0
    one: float = 0
    again: float = 0
    casts: float = 0
    passing: float = 0
    back: float = 0


class RecomputeMode(NamedTuple):
    """How a rank goes through a tower: positions of a micro-batch, what is computed again, bytes of a weight's cast."""

    positions: int
    how: str | int
    casts: int


class LayerView(NamedTuple):
    """What activations depend on besides the part of the network: a key, so that they are added up once."""

    saved: Saved
    width: int
    tp: int
    parts: int
    cpu: bool
    gathered: float
    passing: float
    samples: int
    ep: int
    ways: tuple[tuple[str, RecomputeMode], ...]
    back: int


@lru_cache(maxsize=4096)
def layer_bytes(layer: OutlineLayer, saved: Saved, width: int, tp: int, parts: int, cpu: bool) -> LayerBytes:
    """Return what a layer keeps of one position on one of `tp` slices.

    Norms keep the stream (and on a CPU, where they are not fused, its normed form), projections their input, flash
    attention query, key, value, output and a logarithm a head. `parts` is how many parts of the sequence gather their
    keys and values here: those of all are there, once for each query head.
    """
    stream = (saved.stream + 8 * cpu + (0 if layer.gated else saved.masks)) * layer.hidden
    inputs = saved.inputs * layer.hidden
    beside = 1 if saved.slices == "nothing" else tp  # a norm sees every feature: without sequence parallelism, whole
    split = (_attention(layer, saved, width, parts) + _feed_forward(layer, saved, width)) / tp
    none = stream / beside + inputs / (tp if saved.slices == "all" else 1) + split
    full = saved.input * layer.hidden / beside
    return LayerBytes(none, min(none, full + _products(layer, saved, width) / tp), min(none, full))


def _attention(layer: OutlineLayer, saved: Saved, width: int, parts: int) -> float:
    query, output = layer.heads * layer.head_dim, layer.heads * layer.value_dim
    keys = layer.kv_heads if parts == 1 and not saved.repeats else layer.heads * parts
    narrow = layer.qk_norm * (query + layer.kv_heads * layer.head_dim)
    if latent := layer.latent:  # every head has its own keys and values, widened from a normed narrow middle
        keys = layer.heads * parts
        narrow += 2 * (latent.query_rank + latent.kv_rank) + latent.rope_dim
    return width * (query + keys * (layer.head_dim + layer.value_dim) + output + narrow) + 4 * layer.heads


def _feed_forward(layer: OutlineLayer, saved: Saved, width: int) -> float:
    if (experts := layer.experts) is None:
        return width * (saved.gated if layer.gated else saved.plain) * layer.ffn
    # Each token's row is copied to its experts and back. Experts stay eager: their rows are counted at run time.
    tensors = 4 if layer.gated else 2
    return width * (experts.top_k * (tensors * experts.ffn + 2 * layer.hidden) + tensors * experts.shared_ffn)


def _products(layer: OutlineLayer, saved: Saved, width: int) -> float:
    """Return what selective recompute keeps besides the layer's input: what attention returns, and some products."""
    if saved.selective == "attention":
        return float("inf")
    kept = layer.heads * layer.value_dim + layer.kv_heads * layer.value_dim + layer.hidden + layer.active_ffn
    if saved.selective == "first":
        kept += layer.heads * layer.head_dim
    return width * kept + 4 * layer.heads


def recomputed(how: str | int, count: int) -> int:
    """Return how many of `count` layers backward computes again; every k-th begins with the first."""
    if isinstance(how, int):
        return -(-count // how)
    return 0 if how == "none" else count


def kept_bytes(each: LayerBytes, how: str | int, count: int) -> float:
    """Return what `count` layers keep of one position."""
    again = recomputed(how, count)
    return (count - again) * each.none + again * (each.selective if how == "selective" else each.full)


def kept_on(scene: MemoryInputs, part: RankPart, *, gathered: float) -> SavedActivations:
    """Return what a rank keeps. A slice may keep `gathered` bytes a feature of inputs that it gathered.

    A frozen tower keeps nothing where no trained one stands before it. Only our own parts of a sequence gather keys:
    those of the others pass them round.
    """
    job, plan, ways = scene.job, scene.plan, {}
    for holding in part.holdings:
        tower = holding.tower
        casts = _casts(scene, tower) if job.sharding_of(tower, plan) == "none" else 0
        ways[tower.name] = RecomputeMode(job.positions(tower, plan), job.recompute_of(tower, plan), casts)
    parts = plan.mesh.cp if job.stack.name == "trimaran" and plan.comm.context == "gather" else 1
    look = LayerView(
        scene.saved, scene.width, scene.tp, parts, scene.cpu and scene.saved is not JOINT, gathered,
        scene.profile.regathers[1] if scene.tp > 1 else 0, plan.micro_batch, plan.mesh.ep, tuple(ways.items()),
        BACK[scene.saved is JOINT] if job.stack.name == "trimaran" else 0,
    )  # fmt: skip
    return _kept(part, look)


@lru_cache(maxsize=1 << 14)  # a search asks again for each way to shard and offload
def _kept(part: RankPart, look: LayerView) -> SavedActivations:
    found, trains, ways = SavedActivations(), False, dict(look.ways)
    for piece in part.pieces:
        trains = trains or not piece.tower.frozen
        if trains:
            way = ways[piece.tower.name]
            more = (
                _of_layers(look, piece, way) if isinstance(piece.block, OutlineLayer) else _of_opaque(look, piece, way)
            )
            found = _together(found, more)
    return found._replace(casts=found.casts * part.flying)


def _together(first: SavedActivations, second: SavedActivations) -> SavedActivations:
    return SavedActivations(
        first.layers + second.layers,
        max(first.one, second.one),
        max(first.again, second.again),
        first.casts + second.casts,
        max(first.passing, second.passing),
        max(first.back, second.back),
    )


def _of_layers(look: LayerView, piece: LayerSlice, way: RecomputeMode) -> SavedActivations:
    layer, count, tp = piece.block, piece.count, look.tp
    assert isinstance(layer, OutlineLayer), "the only block whose operators are known"
    each, again = layer_bytes(layer, look.saved, look.width, tp, look.parts, look.cpu), recomputed(way.how, count)
    matrices = layer.dense_weights // tp + layer.router_weights + layer.expert_weights // (tp * look.ep)
    return SavedActivations(
        layers=way.positions * (kept_bytes(each, way.how, count) + count * look.gathered * layer.hidden),
        one=way.positions * kept_bytes(each, way.how, 1),
        again=way.positions * each.none if again else 0,
        casts=way.casts * (count - again) * matrices,
        passing=way.positions * layer.hidden * look.passing,
        back=way.positions * look.width * (look.back * layer.active_ffn + 2 * layer.hidden) / tp if look.back else 0,
    )


def _casts(scene: MemoryInputs, tower: Tower) -> int:
    """Return the bytes of a weight's cast. A half is what products take; what is frozen stays whole, and is cast."""
    return scene.width if scene.halves and tower.frozen else scene.casts


def _of_opaque(look: LayerView, piece: LayerSlice, way: RecomputeMode) -> SavedActivations:
    block, again = piece.block, recomputed(way.how, piece.count)
    assert not isinstance(block, OutlineLayer), "of which only totals are known"
    layers = look.samples * ((piece.count - again) * block.saved_bytes + again * block.output_bytes)
    return SavedActivations(
        layers=layers, one=layers / piece.count, again=look.samples * block.saved_bytes if again else 0
    )

"""Activation memory: the bytes that forward saves for backward, per token and layer, and per rank."""

from functools import lru_cache
from typing import NamedTuple

from trimaran.cost.job import FP32_BYTES, MemoryInputs
from trimaran.cost.rank_part import LayerGroup, RankPart
from trimaran.cost.stack_profiles import JOINT_PROJECTIONS, Saved
from trimaran.models import OutlineLayer

# Tensors of feed-forward width that the feed-forward's backward holds besides what forward saved: the gradients of the
# factors and of their product. With joint projections (the second figure) it also holds one that it recomputes.
# Other stacks' figures include this in their fitted constants.
BACKWARD_FFN_TENSORS = (3, 4)
# Per hidden feature, that both norms save in fp32 for the gradient of their weights, where they are not fused.
NORMALISED_BYTES = 8
# Linear layers whose input is a norm's output, which several of them share; and those of them in the feed-forward.
FEED_FORWARD_INPUTS = ("gate_proj", "up_proj")
SHARED = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", *FEED_FORWARD_INPUTS)


class LayerBytes(NamedTuple):
    """Bytes that one layer saves per token, for each recompute mode."""

    none: float
    elementwise: float
    selective: float
    full: float


class SavedActivations(NamedTuple):
    """Activation bytes of one micro-batch on a rank.

    at_recompute: the same, where it is the most together with `layers` of that layer and all before it, less `layers`.
    deferred: gradients of the outputs of all matmuls and norms, which a split backward keeps for those of the weights.
    """

    layers: float = 0  # saved by all layers
    one_layer: float = 0  # saved by the largest single layer
    recomputed: float = 0  # saved by one layer while backward recomputes it
    at_recompute: float = 0
    casts: float = 0  # 16-bit weight copies that autocast keeps from forward to backward, except in recomputed layers
    exchanged: float = 0  # buffers that tensor-parallel ranks exchange
    backward: float = 0  # gradients inside the layer whose backward is running, and its input if that is gathered again
    deferred: float = 0


class RecomputeMode(NamedTuple):
    """How a rank runs one tower: tokens of a micro-batch, recompute mode, and bytes of each weight's autocast copy."""

    positions: int
    recompute: str | int
    cast_bytes: int
    tp: int  # ranks that split the tower's matrices
    length: int  # positions that attend to each other


class LayerView(NamedTuple):
    """All that activation memory depends on besides the rank's layers. Hashable, so that results can be cached."""

    saved: Saved
    element_bytes: int
    parts: int  # how many sequence parts gather their keys and values on this rank
    mask_bytes: float  # of a mask for documents, per token and layer
    is_ring: bool  # keys arrive from one rank after the other
    cpu: bool
    gathered_bytes: float
    exchanged_bytes: float
    samples: int
    ep: int
    modes: tuple[tuple[str, RecomputeMode], ...]
    backward_tensors: int
    shares_casts: bool


@lru_cache(maxsize=4096)
def layer_bytes(layer: OutlineLayer, saved: Saved, element_bytes: int, tp: int, parts: int, cpu: bool) -> LayerBytes:
    """Return the bytes that a layer saves per token on one of `tp` ranks.

    Norms save the residual stream. On a CPU, where they are not fused, they save it in fp32, and its normalised form
    for the gradient of their weight. Projections save their input, but frozen ones only for their adapter. Flash
    attention saves query, key, value, output and one logsumexp per head. `parts` is how many sequence parts gather
    their keys and values on this rank: it holds those of all parts, once per query head.
    """
    unfused = saved.unfused_norm_bytes - (0 if layer.adapter is None else NORMALISED_BYTES) if cpu else 0
    fused = max(saved.norm_bytes, layer.operators.norm_bytes) if layer.operators and not cpu else saved.norm_bytes
    norms = (fused + unfused + (0 if layer.gated else saved.mask_bytes)) * layer.hidden
    projections = saved.projection_bytes * layer.hidden * _saved_inputs(layer)
    norm_split = 1 if saved.tp_splits == "nothing" else tp  # without sequence parallelism every rank has all features
    matmuls = (_attention(layer, saved, element_bytes, parts) + _feed_forward(layer, saved, element_bytes)) / tp
    none = norms / norm_split + projections / (tp if saved.tp_splits == "all" else 1) + matmuls
    none += adapter_bytes(layer, element_bytes, tp, mask_bytes=element_bytes if cpu else 1)
    full = saved.input_bytes * layer.hidden / norm_split
    if layer.joining_weights:  # three norms more, and the joined stream and embedding, which is one more input
        none += (1.5 * norms + 2 * element_bytes * layer.hidden) / norm_split
        full *= 2
    selective = min(none, full + _selective(layer, saved, element_bytes) / tp)
    elementwise = min(none, full + _elementwise(layer, saved, element_bytes, tp))
    return LayerBytes(none, elementwise, selective, min(none, full))


def adapter_bytes(layer: OutlineLayer, element_bytes: int, tp: int, *, mask_bytes: int) -> float:
    """Return the bytes per token that a layer's adapters save, besides inputs that several of them share.

    Each saves its low-rank values. With dropout it saves a dropped copy of its input and a mask. DoRA also saves its
    output before the magnitude is applied.
    """
    if (adapter := layer.adapter) is None:
        return 0.0
    total = 0
    for linear in layer.adapted_linears:
        inputs, outputs = linear.on_rank(tp)
        total += element_bytes * (adapter.rank + outputs * adapter.has_magnitude)
        total += (element_bytes + mask_bytes) * inputs * adapter.has_dropout
    return total


def score_bytes(layer: OutlineLayer, element_bytes: int) -> tuple[int, int]:
    """Return the bytes per pair of positions that eager attention keeps, and that its backward holds besides.

    It keeps its probabilities in fp32 and a 16-bit copy. Backward holds the gradients of both, and of the scores.
    """
    if layer.operators is None or not layer.operators.keeps_scores:
        return 0, 0
    copy = element_bytes if element_bytes < FP32_BYTES else 0
    return layer.heads * (FP32_BYTES + copy), layer.heads * (2 * FP32_BYTES + copy)


def _saved_inputs(layer: OutlineLayer) -> float:
    """Return the fraction of the projections' shared inputs that is saved: attention's input and the feed-forward's."""
    if (adapter := layer.adapter) is None:
        return 1.0
    if adapter.has_dropout:  # each adapter saves a copy of its own
        return 0.0
    by_sublayer = {linear.name in FEED_FORWARD_INPUTS for linear in layer.adapted_linears if linear.name in SHARED}
    return len(by_sublayer) / 2 if layer.heads else float(bool(by_sublayer))


def _attention(layer: OutlineLayer, saved: Saved, element_bytes: int, parts: int) -> float:
    query, output = layer.heads * layer.head_dim, layer.heads * layer.value_dim
    keys = layer.kv_heads if parts == 1 and not saved.repeats_kv else layer.heads * parts
    narrow = layer.qk_norm * (query + layer.kv_heads * layer.head_dim)
    if latent := layer.latent:  # every head has its own keys and values, projected up from a normalised latent
        keys = layer.heads * parts
        narrow += 2 * (latent.query_rank + latent.kv_rank) + latent.rope_dim
    return element_bytes * (query + keys * (layer.head_dim + layer.value_dim) + output + narrow) + 4 * layer.heads


def _feed_forward(layer: OutlineLayer, saved: Saved, element_bytes: int) -> float:
    adapter = layer.adapter  # it may need the input of the last matmul as it is
    product = 0 if adapter is None or ("down_proj" in adapter.targets and not adapter.has_dropout) else 1
    if (experts := layer.experts) is None:
        return element_bytes * ((saved.gated_tensors if layer.gated else saved.plain_tensors) - product) * layer.ffn
    # Each token is copied to its experts and back. Experts stay eager, because their row counts depend on the data.
    # Frozen experts, which have no adapter, save neither the input of their first nor that of their last matmul.
    tensors, frozen = 4 if layer.gated else 2, 0 if layer.adapter is None else 1
    routed = experts.top_k * ((tensors - frozen) * experts.ffn + (2 - frozen) * layer.hidden)
    return element_bytes * (routed + (tensors - product) * experts.shared_ffn)


def _selective(layer: OutlineLayer, saved: Saved, element_bytes: int) -> float:
    """Return what selective recompute saves besides the layer's input: attention's output and some matmul outputs."""
    if saved.selective == "attention":
        return float("inf")
    features = layer.heads * layer.value_dim + layer.kv_heads * layer.value_dim + layer.hidden + layer.active_ffn
    if saved.selective == "first":
        features += layer.heads * layer.head_dim
    return element_bytes * features + 4 * layer.heads


def _elementwise(layer: OutlineLayer, saved: Saved, element_bytes: int, tp: int) -> float:
    """Return what elementwise recompute saves besides the layer's input: the outputs of matmuls and attention.

    Inputs of matmuls are computed, and gathered, again. Keys and values of other ranks are gathered again. Of a
    compiled layer only what backward needs is saved; an eager one also saves sums of tensor-parallel ranks before they
    are reduced, and the last matmul's output.
    """
    matrices, latent, experts = 2 if layer.gated else 1, layer.latent, layer.experts
    widths = matrices * layer.ffn
    if experts is not None:  # the rows that are sent to experts and back are saved, too
        widths = experts.top_k * (matrices * experts.ffn + 3 * layer.hidden) + matrices * experts.shared_ffn
    keys = layer.kv_heads if latent is None else layer.heads
    widths += layer.heads * (layer.head_dim + layer.value_dim) + keys * (layer.head_dim + layer.value_dim)
    widths += latent.query_rank + latent.kv_rank + latent.rope_dim if latent else 0
    unused = 0 if saved.drops_unused else (2 if tp > 1 and layer.heads else 1) * layer.hidden
    return element_bytes * ((widths + layer.hidden) / tp + unused) + 4 * layer.heads / tp


def num_recomputed(recompute: str | int, count: int) -> int:
    """Return how many of `count` layers backward recomputes. A number k means every k-th layer, from the first on."""
    if isinstance(recompute, int):
        return -(-count // recompute)
    return 0 if recompute == "none" else count


def saved_layer_bytes(layer: LayerBytes, recompute: str | int, count: int) -> float:
    """Return the bytes that `count` equal layers save per token."""
    recomputed = num_recomputed(recompute, count)
    how = "full" if isinstance(recompute, int) or recompute == "none" else recompute
    return (count - recomputed) * layer.none + recomputed * getattr(layer, how)


def saved_on_rank(inputs: MemoryInputs, part: RankPart, *, gathered: float) -> SavedActivations:
    """Return what a rank saves for one micro-batch.

    `gathered` is how many bytes per feature a tensor-parallel rank saves of inputs that it gathered.
    A tower without anything to train saves nothing unless a trained tower precedes it.
    """
    job, plan, modes = inputs.job, inputs.plan, {}
    is_ours = job.stack.name == "trimaran"
    for holding in part.holdings:
        tower, cast_bytes = holding.tower, 0
        if job.sharding_of(tower, plan) == "none":
            # Split weights need no copy, but frozen ones are not split; beside an adapter they are not fp32 either.
            is_fp32 = inputs.splits_weights and tower.frozen and not tower.compact
            cast_bytes = inputs.element_bytes if is_fp32 else inputs.cast_bytes
        positions, recompute = job.positions(tower, plan), job.recompute_of(tower, plan)
        length = tower.sample_positions(job.seq_len)[1]
        modes[tower.name] = RecomputeMode(positions, recompute, cast_bytes, job.tp_of(tower, plan), length)
    parts, mask_bytes, has_cp = 1, 0.0, is_ours and plan.mesh.cp > 1  # other stacks pass keys around a ring
    if has_cp and plan.comm.context == "gather":
        # Documents need a mask. torch turns it into one number for each query and key, and saves it with every layer.
        parts, mask_bytes = plan.mesh.cp, float(inputs.element_bytes * job.seq_len * job.isolates_documents)
    is_joint = inputs.saved is JOINT_PROJECTIONS
    view = LayerView(
        inputs.saved, inputs.element_bytes, parts, mask_bytes, has_cp and plan.comm.context == "ring",
        inputs.cpu and not is_joint, gathered,
        inputs.profile.gathered_input_bytes[1] if inputs.tp > 1 else 0, plan.micro_batch, plan.mesh.ep,
        tuple(modes.items()), BACKWARD_FFN_TENSORS[is_joint] if is_ours else 0,
        # All micro-batches in flight share one copy of a weight. Compiled blocks cast for each of them.
        is_ours and not plan.compile,
    )  # fmt: skip
    return _saved_by_part(part, view)


@lru_cache(maxsize=1 << 14)  # a search needs the same result for each sharding and offload
def _saved_by_part(part: RankPart, view: LayerView) -> SavedActivations:
    total, trains, modes = SavedActivations(), False, dict(view.modes)
    for group in part.layer_groups:
        trains = trains or group.tower.is_trained
        if trains:
            mode = modes[group.tower.name]
            if isinstance(block := group.block, OutlineLayer):
                second = _layer_group(view, group, block, mode)
            else:  # how much of it elementwise recompute would save is not known
                again = 0 if mode.recompute == "elementwise" else num_recomputed(mode.recompute, group.count)
                layers = view.samples * ((group.count - again) * block.saved_bytes + again * block.output_bytes)
                recomputed = view.samples * block.saved_bytes if again else 0
                second = SavedActivations(layers=layers, one_layer=layers / group.count, recomputed=recomputed)
            total = SavedActivations(
                total.layers + second.layers,
                max(total.one_layer, second.one_layer),
                max(total.recomputed, second.recomputed),
                max(total.at_recompute - second.layers, second.recomputed),
                total.casts + second.casts,
                max(total.exchanged, second.exchanged),
                max(total.backward, second.backward),
                total.deferred + second.deferred,
            )
    return total._replace(casts=total.casts * (1 if view.shares_casts else part.in_flight))


def _layer_group(view: LayerView, group: LayerGroup, layer: OutlineLayer, mode: RecomputeMode) -> SavedActivations:
    count, tp, positions, recompute = group.count, mode.tp, mode.positions, mode.recompute
    one = layer_bytes(layer, view.saved, view.element_bytes, tp, view.parts, view.cpu)
    kept, in_backward = (each * mode.length / tp for each in score_bytes(layer, view.element_bytes))
    masks = view.mask_bytes if layer.heads else 0.0
    one = one._replace(none=one.none + masks + kept)
    ring = 0.0
    if view.is_ring:
        # Gradients are added up in fp32, those of queries also by the kernel. Keys and values of two ranks are here or
        # on their way, and those of this rank are sent; so are gradients of theirs. The kernel gets packed copies of
        # its inputs.
        queries, keys = layer.heads * layer.head_dim, layer.kv_heads * (layer.head_dim + layer.value_dim)
        ring = (queries * (8 + 4 * view.element_bytes) + keys * (8 + 5 * view.element_bytes)) / tp
    recomputed = num_recomputed(recompute, count)
    matrices = layer.dense_weights // tp + layer.router_weights + layer.joining_weights
    matrices += layer.expert_weights // (tp * view.ep)
    if group.tower.compact:  # only adapters are fp32
        matrices = layer.adapter_parameters(tp)
    gradients = view.backward_tensors * layer.active_ffn + 2 * layer.hidden
    gathered_bytes, exchanged_bytes = (view.gathered_bytes, view.exchanged_bytes) if tp > 1 else (0.0, 0.0)
    outputs = (layer.heads + 2 * layer.kv_heads) * layer.head_dim + (layer.matrices - 1) * layer.active_ffn
    again = layer.hidden if tp > 1 and view.saved.tp_splits == "all" and recomputed < count else 0
    backward = max(ring, view.element_bytes * (gradients / tp + again) + in_backward) if view.backward_tensors else 0
    return SavedActivations(
        layers=positions * (saved_layer_bytes(one, recompute, count) + count * gathered_bytes * layer.hidden),
        one_layer=positions * saved_layer_bytes(one, recompute, 1),
        recomputed=positions * one.none if recomputed else 0,
        casts=mode.cast_bytes * (count - recomputed) * matrices,
        exchanged=positions * layer.hidden * exchanged_bytes,
        backward=positions * backward,
        deferred=positions * view.element_bytes * count * (outputs / tp + 4 * layer.hidden),
    )

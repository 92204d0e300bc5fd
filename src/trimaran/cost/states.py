"""Parameter memory of a rank: weights, master weights, moments, gradients, and temporary copies of them."""

import math
from typing import NamedTuple

from trimaran.core import Mesh, Plan
from trimaran.cost.job import (
    ELEMENT_BYTES,
    Job,
    MemoryInputs,
    frees_weights,
    gathers_fp8,
    num_fsdp_units,
    splits_weights,
)
from trimaran.cost.rank_part import PACKED_BYTES, Holding, RankPart

MASTER_BYTES = 4  # fp32, per parameter
HALF_BYTES = 2
# Pinned host memory is allocated in powers of two: a third more than requested, on average.
PINNED_OVERHEAD = 1.33
CHUNK_VALUES = 2**23  # values of a parameter that are updated at once, as in `parallel/optimizer/adamw.py`
NUM_HOST_SLOTS, NUM_DEVICE_BUFFERS = 4, 3  # as in `parallel/optimizer/state_streaming.py`
READ_SLOT_BYTES = 8 * (16 << 20)  # pinned memory to read weights through, as in `parallel/disk_store.py`


class States(NamedTuple):
    """Bytes of one rank's parameters.

    weights, masters, optimizer, gradients: what the rank holds at the end of backward.
    unreduced: of `gradients`, what does not exist yet while backward computes a layer and weights are prefetched.
    """

    weights: float = 0
    masters: float = 0
    optimizer: float = 0
    gradients: float = 0
    gradients_at_loss: float = 0  # gradients that exist already while the loss is computed
    duplicate_gradients: float = 0  # extra bytes while the embedding's gradient is added to an existing one
    gathered_at_loss: float = 0  # gathered (unsharded) weights while the loss is computed
    gathered_in_backward: float = 0  # gathered weights and unreduced gradients while backward computes a layer
    gathered_in_reduction: float = 0  # the same while the gradients of a unit are reduced
    update: float = 0  # temporary bytes of the optimizer update
    host: float = 0  # bytes that are offloaded to the host
    disk: float = 0  # bytes that are offloaded to files
    unreduced: float = 0


def states_of(inputs: MemoryInputs, part: RankPart) -> States:
    """Return the parameter bytes of all towers on the rank.

    The frozen and the trained parameters of a tower with adapters are two holdings, which add up.
    """
    towers = [_tower_states(inputs, part, holding) for holding in part.holdings]
    states = towers[0] if len(towers) == 1 else States(*map(math.fsum, zip(*towers, strict=True)))
    job, plan = inputs.job, inputs.plan
    if not plan.offloads_to_disk:
        return states
    # The memory in front of the files: on a CPU all of it is the rank's own. Pinned memory comes in powers of two.
    trained = sum(num_owned_in(job, plan, holding) for holding in part.holdings if holding.is_trained)
    chunk = min(CHUNK_VALUES, trained) * streamed_bytes(job, plan)
    slots = NUM_HOST_SLOTS * (2 ** math.ceil(math.log2(max(1.0, chunk))))
    slots += READ_SLOT_BYTES if plan.offload == "parameters" else 0
    if inputs.cpu:
        return states._replace(update=states.update + slots, host=0)
    # Chunks are updated on the device, unless the host updates them.
    buffers = 0.0
    if plan.offload != "parameters":
        buffers = NUM_DEVICE_BUFFERS * min(CHUNK_VALUES, trained) * streamed_bytes(job, plan)
    return states._replace(update=states.update + buffers, host=states.host + slots)


def streamed_bytes(job: Job, plan: Plan) -> float:
    """Return the bytes per parameter that an update reads from disk, and writes: moments, and weights."""
    if plan.offload == "parameters":
        return job.state_bytes + MASTER_BYTES
    return job.state_bytes + (HALF_BYTES if splits_weights(job, plan) else 0)  # upper halves are on the device


def num_owned(mesh: Mesh, holding: Holding, sharding: str, image_ranks: int = 1) -> float:
    """Return how many parameters have their optimizer state on this rank. `image_ranks` hold shards, too."""
    if sharding == "none":
        return holding.dense + holding.experts
    return holding.dense / (mesh.shards * image_ranks) + holding.experts / max(1, mesh.expert_ranks // mesh.ep)


def num_owned_in(job: Job, plan: Plan, holding: Holding) -> float:
    """Return how many parameters of the holding have their optimizer state on a rank of the plan."""
    tower = holding.tower
    return num_owned(plan.mesh, holding, job.sharding_of(tower, plan), job.image_ranks(tower, plan))


def owned_weight_bytes(job: Job, plan: Plan, part: RankPart) -> float:
    """Return the bytes of a rank's shard of the weights: fp32, or as frozen weights are stored."""
    element_bytes, total = ELEMENT_BYTES[plan.precision], 0.0
    for holding in part.holdings:
        weight_bytes = stored_bytes(holding, element_bytes) if holding.is_compact else MASTER_BYTES
        total += weight_bytes * num_owned_in(job, plan, holding)
    return total


def exchange_state_bytes(plan: Plan) -> int:
    """Return the bytes per parameter that compressed gradients and local steps keep beside the optimizer's states.

    Error feedback and its momentum; the last synchronised weights, their momentum, and what was not sent of them.
    """
    if plan.comm.compression == "none" and plan.comm.local_steps == 1:  # usual, and read many times
        return 0
    compression, local = plan.comm.compression_settings, plan.comm.local
    kept = bool(compression.error_feedback) + bool(compression.error_feedback and compression.momentum)
    if not local.outer.offload:
        kept += local.keeps_outer_weights + (local.outer.resolved_momentum > 0) + (local.compression == "sparse")
    return MASTER_BYTES * kept


def _tower_states(inputs: MemoryInputs, part: RankPart, holding: Holding) -> States:
    if inputs.splits_weights:
        return _split_weight_states(inputs, holding)
    profile, sharding = inputs.profile, inputs.job.sharding_of(holding.tower, inputs.plan)
    sharding = "none" if holding.largest_packed else sharding  # FSDP leaves 4-bit weights whole
    accumulates = inputs.plan.grad_accum > 1
    image_ranks, count = inputs.job.image_ranks(holding.tower, inputs.plan), holding.dense + holding.experts
    owned = num_owned(inputs.plan.mesh, holding, sharding, image_ranks)
    is_16_bit, offload = inputs.element_bytes == 2, inputs.offload
    weight_bytes, gradient_bytes = (profile.weight_bytes, profile.gradient_bytes) if is_16_bit else (4, 4)
    weight_bytes = stored_bytes(holding, inputs.element_bytes) if holding.is_compact else weight_bytes
    weights = weight_bytes * (count if profile.keeps_full_weights and sharding != "parameters" else owned)
    trained = 1 if holding.is_trained else 0
    masters = trained * (MASTER_BYTES * owned if weight_bytes == 2 else 0)
    optimizer = trained * (inputs.job.state_bytes + exchange_state_bytes(inputs.plan)) * owned
    accumulated = trained * gradient_bytes * (count if _accumulates_full(inputs, sharding) else owned)
    per_parameter, fixed = profile.bucket_bytes
    buckets = per_parameter * count if sharding == "none" and inputs.data > 1 else 0
    if trained and sharding != "none":  # all towers of a rank share buckets of a fixed size
        buckets = fixed * count / part.trained
    extra = trained * (profile.extra_gradient_bytes * count * is_16_bit + buckets)
    gathered = _gathered(inputs, part, holding, sharding)
    host, disk = 0.0, 0.0
    if offload in ("optimizer", "parameters"):
        host, masters, optimizer = masters + optimizer, 0, 0
    if inputs.plan.offloads_to_disk:
        host, disk = 0.0, host + (weights if offload == "parameters" else 0)
        weights = 0 if offload == "parameters" else weights
    if offload == "parameters":  # each gradient shard goes to the host as soon as it is reduced
        on_device = accumulated if inputs.pp > 1 or inputs.cpu else 0
        host, weights, accumulated = host + PINNED_OVERHEAD * (weights + accumulated - on_device), 0, on_device
    # Replicas reduce in buckets that stay between steps. Otherwise the first backward allocates the gradients.
    stays = accumulates or profile.keeps_full_weights or (inputs.data > 1 and sharding == "none")
    gradients_at_loss = accumulated if stays else 0
    update_full, update_owned = profile.update_bytes
    update = trained * (update_full * count * (owned < count) + update_owned * owned)
    adds = accumulates or holding.tower.tied  # a tied head's gradient is there before the embedding's
    whole = sharding == "none" and not profile.keeps_full_weights
    duplicate_gradients = trained * adds * 4 * holding.root if whole else 0
    gradients = accumulated + extra, gradients_at_loss + extra, duplicate_gradients
    states = States(weights, masters, optimizer, *gradients, *gathered)
    unreduced = 0 if stays else accumulated * _unreduced_fraction(inputs, part, holding, sharding)
    return states._replace(update=max(0, update - extra), host=host, disk=disk, unreduced=unreduced)


def _unreduced_fraction(inputs: MemoryInputs, part: RankPart, holding: Holding, sharding: str) -> float:
    """Return the fraction of a tower's gradients that are not reduced yet when the last weights are prefetched.

    They are those of the root, of the unit whose backward runs, and of the prefetched ones.
    """
    if sharding == "none" or len(part.holdings) > 1:
        return 0.0
    if inputs.profile.fsdp != "root" or not frees_weights(inputs.plan, sharding):
        return 0.0
    count = holding.dense + holding.experts
    layer = (count - holding.root) / max(1, holding.layers)
    num_units = num_fsdp_units(inputs.job, inputs.plan, layer, holding.layers)
    if num_units < 2 or not count:
        return 0.0
    units = min(holding.layers, (1 + inputs.plan.comm.prefetch) * math.ceil(holding.layers / num_units))
    return (holding.root + units * layer) / count


def _split_weight_states(inputs: MemoryInputs, holding: Holding) -> States:
    """Return the bytes of a tower whose matrices are stored as upper and lower 16 bits (one device).

    A tied embedding, the magnitudes of DoRA, and frozen weights without an adapter stay in fp32. With gradient
    accumulation 16-bit gradients are added to fp32 sums, one parameter at a time.
    """
    tower, count = holding.tower, holding.dense + holding.experts
    if not holding.is_trained:
        return States(weights=(stored_bytes(holding, HALF_BYTES) if holding.is_compact else MASTER_BYTES) * count)
    tied = holding.root if tower.tied else 0
    whole = tied + holding.magnitudes
    split, accumulates = count - whole, inputs.plan.grad_accum > 1
    gradients = (MASTER_BYTES if accumulates else HALF_BYTES) * split + MASTER_BYTES * whole
    # Embedding and head are equally large, so half of the root is one of them.
    duplicate_gradients = MASTER_BYTES * tied if tied else accumulates * HALF_BYTES * holding.root / 2
    masters, optimizer = HALF_BYTES * split, inputs.job.state_bytes * count
    to_disk = inputs.plan.offloads_to_disk
    return States(
        weights=HALF_BYTES * split + MASTER_BYTES * whole,
        masters=0 if to_disk else masters,
        optimizer=0 if to_disk else optimizer,
        disk=masters + optimizer if to_disk else 0,
        gradients=gradients,
        gradients_at_loss=gradients if accumulates else 0,
        duplicate_gradients=duplicate_gradients,
    )


def stored_bytes(holding: Holding, element_bytes: int) -> float:
    """Return the mean bytes per parameter of frozen weights beside an adapter: 4 bits, or the compute precision."""
    if holding.largest_packed:
        return PACKED_BYTES
    wider = max(0, MASTER_BYTES - element_bytes) * holding.routers
    return element_bytes + wider / max(1, holding.parameters)


def _accumulates_full(inputs: MemoryInputs, sharding: str) -> bool:
    """Return whether gradients are unsharded while they accumulate.

    Sharded gradients are reduced with every micro-batch. Gradients that are reduced only with the last micro-batch stay
    unsharded: those of replicas, of ZeRO-1, and of a pipeline with FSDP.
    """
    if sharding == "none" or inputs.profile.keeps_full_weights:
        return sharding in ("none", "optimizer")
    return inputs.plan.grad_accum > 1 and (sharding == "optimizer" or inputs.pp > 1)


def _gathered(inputs: MemoryInputs, part: RankPart, holding: Holding, sharding: str) -> tuple[float, float, float]:
    """Return the bytes of gathered weights, and of gradients that are not reduced: the three such fields of `States`.

    With resharding, at the loss only the root (or the head alone) is gathered; if weights are resharded over fewer
    ranks, also a shard of each layer. Backward adds the current unit of layers, the prefetched ones, the head's
    gradient, and the unit before it in fp32, which is being reduced. Its own weights are freed before its gradients,
    which it has in 16 bits, are copied to fp32. Offloaded weights arrive in fp32 before the cast.
    """
    if sharding == "none" or (inputs.profile.keeps_full_weights and sharding != "parameters"):
        return 0, 0, 0
    count, root, element_bytes = holding.dense + holding.experts, holding.root, inputs.element_bytes
    layer = (count - root) / max(1, holding.layers)
    num_units = max(1, num_fsdp_units(inputs.job, inputs.plan, layer, holding.layers))
    unit = layer * math.ceil(holding.layers / num_units)
    own, reduced = (element_bytes, MASTER_BYTES) if holding.is_trained else (0, 0)
    layer_bytes = 1 if gathers_fp8(inputs.job, inputs.plan) else element_bytes
    before = reduced * unit if num_units > 1 else 0.0
    if not frees_weights(inputs.plan, sharding):
        gathered = element_bytes * root + layer_bytes * (count - root)
        if _accumulates_full(inputs, sharding):  # nothing is reduced until the last micro-batch
            before = 0.0
        return gathered, gathered + before, gathered + (own + reduced) * unit
    comm = inputs.plan.comm
    at_loss = element_bytes * (min(root, part.head or root) if inputs.profile.fsdp == "ends" else root)
    if isinstance(comm.reshard, int):
        at_loss += layer_bytes * holding.layers * layer / comm.reshard
    if inputs.offload == "parameters":
        at_loss += 4 * root / inputs.shards
    waiting = at_loss + own * (part.head or root)
    prefetched = layer_bytes * min(holding.layers * layer, comm.prefetch * unit)
    current = layer_bytes * min(holding.layers * layer, (1 + comm.prefetch) * unit)
    return at_loss, waiting + current + before, waiting + prefetched + (own + reduced) * unit

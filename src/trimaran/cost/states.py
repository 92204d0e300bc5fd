"""What a rank holds of the parameters: weights, masters, moments, gradients, and copies of them that come and go."""

import math
from typing import NamedTuple

from trimaran.core import Mesh
from trimaran.cost.job import frees_weights
from trimaran.cost.memory_inputs import MemoryInputs
from trimaran.cost.rank_part import Holding, RankPart

MASTER = 4  # bytes a parameter
HALF = 2
# Memory that a device may copy from comes in powers of two: a third more than asked for, on average.
PINNED = 1.33


class States(NamedTuple):
    """Bytes of one rank's parameters.

    `gathered` are whole while the loss is computed, `working` in backward: the weights of the layers at work with their
    gradients on the way. `early` gradients are there at the loss already, those of an embedding `twice` while they are
    added to what was there; `passing` is what an update needs on top. `host` is what lies off the device.
    """

    weights: float = 0
    masters: float = 0
    optimizer: float = 0
    gradients: float = 0
    early: float = 0
    twice: float = 0
    gathered: float = 0
    working: float = 0
    passing: float = 0
    host: float = 0


def states_of(scene: MemoryInputs, part: RankPart) -> States:
    """Return the states of all towers on the rank."""
    found = [_states(scene, part, holding) for holding in part.holdings]
    return found[0] if len(found) == 1 else States(*map(math.fsum, zip(*found, strict=True)))


def owned(mesh: Mesh, holding: Holding, sharding: str) -> float:
    """Return how many parameters of the holding this rank keeps the states of: all that it has, or its slice."""
    if sharding == "none":
        return holding.dense + holding.experts
    return holding.dense / mesh.shards + holding.experts / max(1, mesh.expert_ranks // mesh.ep)


def _states(scene: MemoryInputs, part: RankPart, holding: Holding) -> States:
    if scene.halves:
        return _halves(scene, holding)
    profile, sharding = scene.profile, scene.job.sharding_of(holding.tower, scene.plan)
    accumulates = scene.plan.grad_accum > 1
    count, mine = holding.dense + holding.experts, owned(scene.plan.mesh, holding, sharding)
    low, off = scene.width == 2, scene.offload
    weight, gradient = (profile.weight, profile.gradient) if low else (4, 4)
    weights = weight * (count if profile.whole and sharding != "parameters" else mine)
    trained = 0 if holding.tower.frozen else 1
    masters = trained * (MASTER * mine if weight == 2 else 0)
    optimizer = trained * scene.job.state_bytes * mine
    summed = trained * gradient * (count if _sums_whole(scene, sharding) else mine)
    copies, fixed = profile.buckets
    buckets = copies * count if sharding == "none" and scene.data > 1 else 0
    if trained and sharding != "none":  # all towers of a rank share those that have a size
        buckets = fixed * count / part.trained
    loose = trained * (profile.loose * count * low + buckets)
    gathered, working = _gathered(scene, part, holding, sharding)
    host = 0.0
    if off in ("optimizer", "parameters"):
        host, masters, optimizer = masters + optimizer, 0, 0
    if off == "parameters":  # each slice of a gradient goes to the host as soon as it is reduced
        kept = summed if scene.pp > 1 else 0
        host, weights, summed = host + PINNED * (weights + summed - kept), 0, kept
    # Replicas reduce in buckets that stay between steps; elsewhere the first backward makes the gradients.
    early = summed if accumulates or profile.whole or (scene.data > 1 and sharding == "none") else 0
    of_all, of_mine = profile.update
    passing = trained * (of_all * count * (mine < count) + of_mine * mine)
    adds = accumulates or holding.tower.tied  # a tied head's gradient is there before the embedding's
    twice = trained * adds * 4 * holding.root if sharding == "none" and not profile.whole else 0
    states = States(weights, masters, optimizer, summed + loose, early + loose, twice, gathered, working)
    return states._replace(passing=max(0, passing - loose), host=host)


def _halves(scene: MemoryInputs, holding: Holding) -> States:
    """Return the states of a tower on a device of its own, whose matrices are kept as two halves.

    What is frozen stays whole, and so does an embedding that is the head as well. Over several micro-batches 16-bit
    gradients are added to sums in fp32, one parameter at a time.
    """
    tower, count = holding.tower, holding.dense + holding.experts
    if tower.frozen:
        return States(weights=MASTER * count)
    shared = holding.root if tower.tied else 0
    split, sums = count - shared, scene.plan.grad_accum > 1
    gradients = (MASTER if sums else HALF) * split + MASTER * shared
    adds = MASTER * shared if shared else sums * HALF * holding.root / 2  # embedding and head are as large
    return States(
        weights=HALF * split + MASTER * shared,
        masters=HALF * split,
        optimizer=scene.job.state_bytes * count,
        gradients=gradients,
        early=gradients if sums else 0,
        twice=adds,
    )


def _sums_whole(scene: MemoryInputs, sharding: str) -> bool:
    """Return whether gradients are whole while they accumulate.

    Sharded ones are reduced with every micro-batch. Those that travel with the last alone stay whole: the replicas',
    those of ZeRO-1, and, where FSDP shards, all of a pipeline's.
    """
    if sharding == "none" or scene.profile.whole:
        return sharding in ("none", "optimizer")
    return scene.plan.grad_accum > 1 and (sharding == "optimizer" or scene.pp > 1)


def _gathered(scene: MemoryInputs, part: RankPart, holding: Holding, sharding: str) -> tuple[float, float]:
    """Return the bytes of the weights that a sharded rank has whole at the loss, and in backward.

    What is freed leaves, at the loss, the root (or the head alone) and, where weights stay split over a few ranks, a
    slice of each layer. Backward adds the layer at work, those fetched ahead, and a layer's and the
    root's gradients in 16 bit and, to be reduced, in fp32. Offloaded weights come up in fp32 before they are cast.
    """
    if sharding == "none" or (scene.profile.whole and sharding != "parameters"):
        return 0, 0
    count, root = holding.dense + holding.experts, holding.root
    layer = (count - root) / max(1, holding.layers)
    trained = 0 if holding.tower.frozen else scene.width + 4
    if not frees_weights(scene.plan, sharding):
        return scene.width * count, scene.width * count + trained * layer
    comm = scene.plan.comm
    gathered = scene.width * (min(root, part.head or root) if scene.profile.fsdp == "ends" else root)
    if isinstance(comm.reshard, int):
        gathered += scene.width * holding.layers * layer / comm.reshard
    if scene.offload == "parameters":
        gathered += 4 * root / scene.shards
    at_work = scene.width * min(holding.layers, 1 + comm.prefetch) * layer
    return gathered, gathered + at_work + trained * layer + scene.width * root * (trained > 0)

"""How long ranks talk: inside a micro-batch, and about gradients and weights, which computing may hide."""

import math
from typing import NamedTuple

from trimaran.core import Bytes, Plan, Seconds
from trimaran.cost.collective import (
    Ring,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_of,
    send_seconds,
)
from trimaran.cost.memory import WIDTH, frees_weights, local_tokens, recomputed_layers
from trimaran.cost.pipeline import Part
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec

# The share of computing behind which a collective can hide. Gloo's threads need the cores that compute.
OVERLAP = {"cuda": 0.8, "cpu": 0.0}


class Rings(NamedTuple):
    """The rings that parameters travel on: their shards, and the replicas of those."""

    shards: Ring
    replicas: Ring


def micro_batch_seconds(spec: ModelSpec, cluster: Cluster, plan: Plan, part: Part, *, seq_len: int) -> Seconds:
    """Return the communication inside one micro-batch's forward and backward; both wait for it.

    Backward has the mirror image of forward's, and forward's once more for the layers that it computes again.
    """
    forward = part.layers * layer_seconds(spec, cluster, plan, seq_len=seq_len)
    again = forward * recomputed_layers(plan, part.layers) / max(1, part.layers)
    pipe = ring_of(cluster, num_ranks=plan.mesh.pp, stride=plan.mesh.world_size // plan.mesh.pp)
    stream = Bytes(WIDTH[plan.precision] * local_tokens(plan, seq_len) * spec.hidden // plan.mesh.tp)
    hops = 2 * plan.num_stages // plan.mesh.pp * send_seconds(stream, pipe) * (1 - OVERLAP[cluster.device.kind])
    return Seconds(2 * forward + again + hops)


def layer_seconds(spec: ModelSpec, cluster: Cluster, plan: Plan, *, seq_len: int) -> Seconds:
    """Return the communication of one layer's forward.

    Tensor parallelism gathers the sequence and scatters the sum, once for attention and once for the feed-forward.
    Context parallelism gathers keys and values, or exchanges heads for positions and back. Expert parallelism sends
    each token to its experts and back.
    """
    mesh, width, tokens = plan.mesh, WIDTH[plan.precision], local_tokens(plan, seq_len)
    slices = ring_of(cluster, num_ranks=mesh.tp, stride=1)
    stream = Bytes(width * tokens * spec.hidden)
    seconds = 2 * (all_gather_seconds(stream, slices) + reduce_scatter_seconds(stream, slices))
    pieces = ring_of(cluster, num_ranks=mesh.cp, stride=mesh.tp)
    if plan.comm.context == "gather":
        key_value = 2 * width * tokens * mesh.cp * spec.kv_heads * spec.head_dim // mesh.tp
        seconds += all_gather_seconds(Bytes(key_value), pieces)
    else:
        moved = 2 * width * tokens * (spec.heads + spec.kv_heads) * spec.head_dim // mesh.tp
        seconds += all_to_all_seconds(Bytes(moved), pieces)
    if (experts := spec.block.experts) is not None:
        homes = ring_of(cluster, num_ranks=mesh.ep, stride=mesh.tp)
        seconds += 2 * all_to_all_seconds(Bytes(experts.top_k * stream), homes)
    return Seconds(seconds)


def exposed_seconds(cluster: Cluster, plan: Plan, part: Part, *, forward: Seconds, backward: Seconds) -> Seconds:
    """Return the communication of a step's weights and gradients that no computing hides.

    Replicas reduce once, with the last backward. Shards gather their weights layer by layer: for every forward and
    backward where they are freed in between, once a step where they are kept. Sharded gradients travel with every
    backward, whole ones with the last. The first gather and the last bucket hide behind nothing.
    """
    overlap, count = OVERLAP[cluster.device.kind], plan.grad_accum
    if plan.sharding == "none":
        bucket_bytes, pairs = plan.comm.bucket_mb * 2**20, _pairs(cluster, plan, part)
        buckets = max(1, math.ceil(4 * part.parameters / bucket_bytes))
        bucket = sum(all_reduce_seconds(Bytes(4 * num // buckets), rings.replicas) for num, rings in pairs)
        return Seconds(max(buckets * bucket - overlap * backward, bucket))
    units = part.layers + 1  # and the root: embedding, last norm and head
    gather, reduce = _unit_seconds(cluster, plan, part, units=units)
    freed = frees_weights(plan)
    gathers = count if freed else 1
    again = gather if freed else 0.0
    reductions = 1 if plan.sharding == "optimizer" or plan.mesh.pp > 1 else count
    forwards = gathers * max(units * gather - overlap * forward, gather)
    reducing = reductions * max(units * (again + reduce) - overlap * backward, reduce)
    others = (count - reductions) * max(units * again - overlap * backward, 0)
    return Seconds(forwards + reducing + others)


def _unit_seconds(cluster: Cluster, plan: Plan, part: Part, *, units: int) -> tuple[float, float]:
    """Return how long it takes to gather the weights of one unit, and to reduce its gradients."""
    gather = reduce = 0.0
    for num, rings in _pairs(cluster, plan, part):
        gather += all_gather_seconds(Bytes(WIDTH[plan.precision] * num // units), rings.shards)
        reduce += reduce_scatter_seconds(Bytes(4 * num // units), rings.shards)
        reduce += all_reduce_seconds(Bytes(4 * num // units // rings.shards.num_ranks), rings.replicas)
    return gather, reduce


def _pairs(cluster: Cluster, plan: Plan, part: Part) -> list[tuple[int, Rings]]:
    """Return the numbers of dense and of expert parameters on a rank, each with the rings that they travel on."""
    mesh = plan.mesh
    if plan.sharding == "none":
        dense, spread = (1, mesh.data), (1, mesh.data // mesh.ep)
    else:
        shards = mesh.expert_ranks // mesh.ep
        dense, spread = (mesh.shards, mesh.dp_replicate), (shards, mesh.data // (shards * mesh.ep))
    pairs = [(part.dense, _rings(cluster, *dense, stride=mesh.tp))]
    if part.experts:
        pairs.append((part.experts, _rings(cluster, *spread, stride=mesh.tp * mesh.ep)))
    return pairs


def _rings(cluster: Cluster, shards: int, replicas: int, *, stride: int) -> Rings:
    return Rings(
        ring_of(cluster, num_ranks=shards, stride=stride),
        ring_of(cluster, num_ranks=replicas, stride=stride * shards),
    )

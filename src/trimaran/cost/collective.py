"""How long a collective takes: a ring with a bandwidth and a latency."""

import math
from dataclasses import dataclass

from trimaran.core import Bytes, Seconds
from trimaran.hardware import Cluster

# What a tuned library reaches of a link, and of that, what gathers and scatters reach. cuda: nccl on nodes of 8 H100,
# 436 GB/s all-reduce and 250 GB/s all-gather of 450. cpu: gloo over loopback, measured on two ranks.
ALL_REDUCE_SHARE = {"cuda": 0.85, "cpu": 1.0}
GATHER_SHARE = {"cuda": 0.6, "cpu": 0.35}
LINK_LATENCY = {"cuda": Seconds(5e-6), "cpu": Seconds(3e-4)}
NETWORK_LATENCY = {"cuda": Seconds(15e-6), "cpu": Seconds(3e-4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ranks that pass pieces on to a neighbour. Bandwidths are bytes a second of one rank, latency is of one hop."""

    num_ranks: int
    bandwidth: float
    gather_bandwidth: float
    latency: Seconds


def ring_of(cluster: Cluster, *, num_ranks: int, stride: int) -> Ring:
    """Return the ring through every `stride`-th rank. Rings that leave a node share its network cards.

    The more nodes a ring crosses, the less of the network it gets: published all-reduces on 2 to 64 nodes fall with the
    square root of their number, and so do we.
    """
    kind, device = cluster.device.kind, cluster.device
    in_node = min(num_ranks, max(1, cluster.devices_per_node // stride))
    num_nodes = math.ceil(num_ranks / in_node)
    reach, latency = device.link_bandwidth, LINK_LATENCY[kind]
    if num_nodes > 1:
        reach = min(reach, in_node * device.network_bandwidth) / math.sqrt(num_nodes)
        latency = NETWORK_LATENCY[kind]
    bandwidth = reach * ALL_REDUCE_SHARE[kind]
    return Ring(
        num_ranks=num_ranks, bandwidth=bandwidth, gather_bandwidth=bandwidth * GATHER_SHARE[kind], latency=latency
    )


def all_reduce_seconds(num_bytes: Bytes, ring: Ring) -> Seconds:
    """Return the time to sum `num_bytes` that every rank holds: 2(n-1)/n of them pass each link."""
    return Seconds(2 * _pass_seconds(num_bytes, ring, ring.bandwidth))


def all_gather_seconds(num_bytes: Bytes, ring: Ring) -> Seconds:
    """Return the time until every rank holds all `num_bytes`, of which it held one share."""
    return Seconds(_pass_seconds(num_bytes, ring, ring.gather_bandwidth))


def reduce_scatter_seconds(num_bytes: Bytes, ring: Ring) -> Seconds:
    """Return the time until every rank holds the sum of one share of `num_bytes`."""
    return Seconds(_pass_seconds(num_bytes, ring, ring.gather_bandwidth))


def all_to_all_seconds(num_bytes: Bytes, ring: Ring) -> Seconds:
    """Return the time until every rank has handed out all but its own share of the `num_bytes` that it holds."""
    return Seconds(_pass_seconds(num_bytes, ring, ring.gather_bandwidth))


def send_seconds(num_bytes: Bytes, ring: Ring) -> Seconds:
    """Return the time until the next rank has `num_bytes`; on a ring of one there is none."""
    return Seconds(ring.latency + num_bytes / ring.bandwidth if ring.num_ranks > 1 else 0.0)


def _pass_seconds(num_bytes: Bytes, ring: Ring, bandwidth: float) -> float:
    # Libraries send what is small along a tree, so the wait for the first byte grows with the logarithm of the ranks.
    hops = math.ceil(math.log2(ring.num_ranks))
    return hops * ring.latency + (ring.num_ranks - 1) / ring.num_ranks * num_bytes / bandwidth

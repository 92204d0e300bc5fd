"""How long ranks talk to each other: rings over the links of a cluster."""

import math
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Seconds
from trimaran.hardware import Link

# What rings reach of a link once the message is large: nanotron's slices inside a node of H100, and its gradients on 2
# to 32 nodes.
RING_SHARE = 0.85
NETWORK_SHARE, NETWORK_GATHER_SHARE = 0.85, 0.46
# NVLink's switches add up on the way (NVLS, Hopper and later): 436 of 450 GB/s in nccl_busbw_ultrascale.csv.
SWITCH_SHARE, SWITCH_BANDWIDTH = 0.97, 400e9
# A hop over a network takes 31 us in that table's gathers on 4 to 64 nodes, twice what nccl itself reckons with, and in
# sums 0.65 of that. Sums may also climb a tree of few hops and little bandwidth: 85 of 400 GB/s on 16 nodes there.
NETWORK_HOP, SUM_HOP, TREE_SHARE = 2.1, 0.65, 0.2
MOST_WAITS = 16  # that an exchange has one after another: its messages overlap
GLOO_LATENCY, GLOO_GATHER_SHARE = 1e-4, 0.35  # slower hops are gloo's; its gathers reach 0.35 of a sum (two ranks)
NAMES = ("all_reduce", "all_gather", "all_to_all", "send")


class Ring(NamedTuple):
    """Ranks that pass pieces on to a neighbour, each at a bus bandwidth in bytes a second; latency is of one hop.

    `link` is the outermost that the ring crosses; only a network has trees. `inside` are the ranks that meet without
    it, at `near_bandwidth`. The hop is a gather's.
    """

    num_ranks: int
    link: str
    latency: Seconds
    reduce_bandwidth: float
    gather_bandwidth: float
    exchange_bandwidth: float
    send_bandwidth: float
    tree_bandwidth: float = 0.0
    inside: int = 1
    near_bandwidth: float = math.inf


@lru_cache(maxsize=4096)
def ring_of(levels: tuple[Link, ...], num_ranks: int, stride: int) -> Ring:
    """Return the ring through every `stride`-th rank; what was measured of a link is used in place of what is usual.

    One that leaves a node has the network card of each of its ranks there; a message to one other rank has one card.
    """
    inside, near, link, scale = 1, math.inf, levels[0], 1.0
    for link in levels:
        holds = min(num_ranks, max(1, link.devices // stride))
        if holds == num_ranks:
            break
        near = min(near, RING_SHARE * link.bandwidth) if holds > 1 else near
        inside, scale = holds, holds / link.devices
    far, one = min(near, inside * link.bandwidth), link.bandwidth
    if link is levels[0]:
        usual, tree, hop = _near_bandwidths(link), 0.0, 1.0
    else:
        usual = (NETWORK_SHARE * far, NETWORK_GATHER_SHARE * far, NETWORK_SHARE * one, NETWORK_SHARE * one)
        tree, hop = TREE_SHARE * far, NETWORK_HOP
    shares = (scale, scale, 1.0, 1.0)  # of what all ranks of a node reached together, or each of them
    told = zip(NAMES, shares, usual, strict=True)
    reduce, gather, exchange, send = (link.reached.get(name, 0.0) * share or num for name, share, num in told)
    latency = Seconds(hop * link.latency)
    return Ring(num_ranks, link.name, latency, reduce, gather, exchange, send, tree, inside, near)


def _near_bandwidths(link: Link) -> tuple[float, float, float, float]:
    """Return what the collectives usually reach where one link joins all ranks."""
    if link.latency > GLOO_LATENCY:
        return link.bandwidth, *(GLOO_GATHER_SHARE * link.bandwidth,) * 2, link.bandwidth
    has_switch = link.name == "NVLink" and link.bandwidth > SWITCH_BANDWIDTH
    return (SWITCH_SHARE if has_switch else RING_SHARE) * link.bandwidth, *(RING_SHARE * link.bandwidth,) * 3


def all_reduce_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time to sum `num_bytes` that every rank holds: round the ring twice, or up and down a tree."""
    num = ring.num_ranks
    if num == 1:
        return Seconds(0.0)
    seconds = 2 * (num - 1) * (SUM_HOP * ring.latency + num_bytes / num / ring.reduce_bandwidth)
    if ring.tree_bandwidth:
        seconds = min(seconds, 2 * (math.ceil(math.log2(num)) * ring.latency + num_bytes / ring.tree_bandwidth))
    return Seconds(seconds)


def all_gather_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time until every rank holds all `num_bytes`, of which it held one share; a scatter takes as long."""
    return Seconds((ring.num_ranks - 1) * (ring.latency + num_bytes / ring.num_ranks / ring.gather_bandwidth))


def all_to_all_seconds(num_bytes: float, ring: Ring, *, crossing: float = 1.0) -> Seconds:
    """Return the time until every rank has handed out all but its own share of the `num_bytes` that it holds.

    What stays in a node goes its own way meanwhile. `crossing` is which part of what leaves it travels: with less than
    all, each node gets a copy, and hands on the others inside.
    """
    num, inside = ring.num_ranks, ring.inside
    far = crossing * (num - inside) / num * num_bytes / ring.exchange_bandwidth
    near = (inside - 1) / inside * num_bytes / ring.near_bandwidth
    if crossing == 1.0:
        return Seconds(min(num - 1, MOST_WAITS) * ring.latency + max(far, near))
    return Seconds(min(num / inside, MOST_WAITS) * ring.latency + far + near)


def send_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time until the next rank has `num_bytes`; on a ring of one there is none."""
    return Seconds(ring.latency + num_bytes / ring.send_bandwidth if ring.num_ranks > 1 else 0.0)

"""Time of collectives, rings and trees over the links of a cluster, and how much of it compute hides."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Seconds
from trimaran.machine import Link

# Fraction of a link's bandwidth that rings reach with large messages: from nanotron's tensor parallelism inside an H100
# node, and from its gradients on 2 to 32 nodes.
RING_EFFICIENCY = 0.85
NETWORK_EFFICIENCY, NETWORK_GATHER_EFFICIENCY = 0.85, 0.46
# NVLink switches reduce in the network (NVLS, Hopper and later): 436 of 450 GB/s in nccl_busbw_ultrascale.csv.
NVLS_EFFICIENCY, MIN_NVLS_BANDWIDTH = 0.97, 400e9
# A network hop takes 31 us in that table's all-gathers on 4 to 64 nodes, twice NCCL's own estimate, and 0.65 of that in
# all-reduces. An all-reduce may also use a tree, with fewer hops and less bandwidth: 85 of 400 GB/s on 16 nodes.
NETWORK_HOP_FACTOR, REDUCE_HOP_FACTOR, TREE_EFFICIENCY = 2.1, 0.65, 0.2
MAX_SERIAL_HOPS = 16  # hops of an all-to-all that do not overlap
# Links with a higher latency are Gloo's. Its gathers reach this fraction of an all-reduce (two ranks).
MIN_GLOO_LATENCY_SECONDS, GLOO_GATHER_EFFICIENCY = 1e-4, 0.35
# Between nodes, TCP reaches this fraction of a link, less headers, with any of Gloo's collectives. A message takes a
# round trip, in an all-reduce of two ranks too (`trimaran bench comm` on links of 100 Mbit/s and of 20 ms).
GLOO_NETWORK_EFFICIENCY, MIN_GLOO_NETWORK_LATENCY_SECONDS = 0.92, 2.5e-4
# What TCP sends before the first answer, also after a pause: ten segments, as Linux does. Then twice as much each time.
TCP_WINDOW_BYTES = 10 * 1448
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "send")


class Ring(NamedTuple):
    """A group of ranks and its bus bandwidth per collective, in bytes per second."""

    num_ranks: int
    link: str  # the outermost link that the ring crosses
    latency: Seconds  # of one hop of an all-gather
    reduce_bandwidth: float
    gather_bandwidth: float
    exchange_bandwidth: float
    send_bandwidth: float
    tree_bandwidth: float = 0.0  # 0 where there is no tree; only NCCL's networks have them
    inside: int = 1  # how many of the ranks share an inner link
    near_bandwidth: float = math.inf  # of that link
    reduce_hop: float = REDUCE_HOP_FACTOR  # the latency of one hop of an all-reduce, as a fraction of `latency`
    is_tcp: bool = False  # whether Gloo connects the ranks over a network


@lru_cache(maxsize=4096)
def ring_of(levels: tuple[Link, ...], num_ranks: int, stride: int, hops: str = "network") -> Ring:
    """Return the ring through every `stride`-th rank. A link's measured bandwidth replaces the usual one.

    A ring across nodes uses the network card of each of its ranks in a node. A message to one rank uses one card.
    `hops`: on such a ring all hops take as long as those on the network, as that table shows, or ("own") each takes
    as long as its own link, as NCCL's own model has it (graph/tuning.cc).
    """
    inside, near, link, scale = 1, math.inf, levels[0], 1.0
    for link in levels:
        num_joined = min(num_ranks, max(1, link.devices // stride))
        if num_joined == num_ranks:
            break
        near = min(near, RING_EFFICIENCY * link.bandwidth) if num_joined > 1 else near
        inside, scale = num_joined, num_joined / link.devices
    far, one_card = min(near, inside * link.bandwidth), NETWORK_EFFICIENCY * link.bandwidth
    reduce_hop, is_tcp = REDUCE_HOP_FACTOR, False
    if link is levels[0]:  # it joins all ranks
        tree, hop, ring_bandwidth = 0.0, 1.0, RING_EFFICIENCY * link.bandwidth
        has_switch = link.name == "NVLink" and link.bandwidth > MIN_NVLS_BANDWIDTH
        usual = (NVLS_EFFICIENCY * link.bandwidth if has_switch else ring_bandwidth, *(ring_bandwidth,) * 3)
        if link.latency > MIN_GLOO_LATENCY_SECONDS:
            usual = (link.bandwidth, *(GLOO_GATHER_EFFICIENCY * link.bandwidth,) * 2, link.bandwidth)
    elif link.latency > MIN_GLOO_NETWORK_LATENCY_SECONDS:
        usual, tree, hop = (GLOO_NETWORK_EFFICIENCY * far,) * 4, 0.0, NETWORK_HOP_FACTOR
        # Of the 2(n - 1) hops of Gloo's all-reduce, the first waits for a round trip, the others only for their way: n
        # round trips in all, as measured with 2, 3 and 4 nodes at 50 ms (`benchmarks/slow_links.py`).
        reduce_hop, is_tcp = num_ranks / (2 * max(1, num_ranks - 1)), True
    else:
        usual = (NETWORK_EFFICIENCY * far, NETWORK_GATHER_EFFICIENCY * far, one_card, one_card)
        tree, hop = TREE_EFFICIENCY * far, NETWORK_HOP_FACTOR
    # All-reduce and all-gather were measured with all ranks of a node together, the others per rank.
    scales = (scale, scale, 1.0, 1.0)
    reduce, gather, exchange, send = (
        link.reached.get(name, 0.0) * fraction or bandwidth
        for name, fraction, bandwidth in zip(COLLECTIVES, scales, usual, strict=True)
    )
    latency = Seconds(hop * link.latency)
    if hops == "own" and link is not levels[0]:
        latency = Seconds((link.latency + (inside - 1) * levels[0].latency) / inside)
    return Ring(num_ranks, link.name, latency, reduce, gather, exchange, send, tree, inside, near, reduce_hop, is_tcp)


def all_reduce_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time to reduce `num_bytes` that every rank holds: twice around the ring, or up and down a tree."""
    num = ring.num_ranks
    if num == 1:
        return Seconds(0.0)
    seconds = 2 * (num - 1) * (ring.reduce_hop * ring.latency + num_bytes / num / ring.reduce_bandwidth)
    if ring.tree_bandwidth:
        seconds = min(seconds, 2 * (math.ceil(math.log2(num)) * ring.latency + num_bytes / ring.tree_bandwidth))
    return Seconds(seconds)


def all_gather_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time until every rank holds all `num_bytes`, of which it had a shard; also of a reduce-scatter."""
    return Seconds((ring.num_ranks - 1) * (ring.latency + num_bytes / ring.num_ranks / ring.gather_bandwidth))


def slow_start_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return how much longer the first `num_bytes` of a connection take after a pause; 0 where it is not Gloo's.

    The window of TCP doubles with each round trip until it fills the link, or until everything is sent.
    """
    if ring.num_ranks == 1 or not ring.is_tcp:
        return Seconds(0.0)
    window = min(num_bytes, ring.send_bandwidth * ring.latency)
    return Seconds(ring.latency * max(0.0, math.log2(window / TCP_WINDOW_BYTES)) if window > 0 else 0.0)


def all_to_all_seconds(num_bytes: float, ring: Ring, *, crossing: float = 1.0) -> Seconds:
    """Return the time until every rank has sent all but its own part of the `num_bytes` that it holds.

    Traffic inside a node runs in parallel. `crossing` is the fraction of the traffic between nodes that is really sent:
    below 1, each node receives one copy and forwards it inside, which does not run in parallel.
    """
    num, inside = ring.num_ranks, ring.inside
    far = crossing * (num - inside) / num * num_bytes / ring.exchange_bandwidth
    near = (inside - 1) / inside * num_bytes / ring.near_bandwidth
    if crossing == 1.0:
        return Seconds(min(num - 1, MAX_SERIAL_HOPS) * ring.latency + max(far, near))
    return Seconds(min(num / inside, MAX_SERIAL_HOPS) * ring.latency + far + near)


def send_seconds(num_bytes: float, ring: Ring) -> Seconds:
    """Return the time until the next rank has `num_bytes`; 0 on a ring of one rank."""
    return Seconds(ring.latency + num_bytes / ring.send_bandwidth if ring.num_ranks > 1 else 0.0)


def exposed_reduction(num_bytes: float, bucket_bytes: float, ring: Ring, backward: float) -> float:
    """Return how long DDP's all-reduces of `num_bytes` continue after a backward of `backward` seconds has ended.

    Buckets are reduced one after another. The first starts when its part of backward is done, and the last one when all
    of it is. Each costs the latency of the ring.
    """
    size = min(bucket_bytes, num_bytes)
    count = math.ceil(num_bytes / size)
    one = all_reduce_seconds(size, ring)
    return max(backward * size / num_bytes + count * one, backward + one) - backward


class GatheredUnit(NamedTuple):
    """An FSDP unit: the time to gather its weights, and that of the compute which they are for."""

    gather: float
    compute: float


def exposed_gathers(units: Sequence[GatheredUnit], prefetch: int) -> float:
    """Return how long compute waits for weights, of which those of `prefetch` units ahead are being gathered.

    A unit's gather may start when the compute of the unit that far before it starts, and after the gather before it.
    So a gather that takes longer than compute is hidden only if units before it had time to spare: between equal units
    no depth helps.
    """
    starts: list[float] = []
    gathered = computed = 0.0
    for number, unit in enumerate(units):
        gathered = max(gathered, starts[number - prefetch] if number >= prefetch else 0.0) + unit.gather
        starts.append(max(computed, gathered))
        computed = starts[-1] + unit.compute
    return computed - sum(unit.compute for unit in units)

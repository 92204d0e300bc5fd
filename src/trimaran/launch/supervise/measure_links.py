"""Measures the links between the nodes of a run, and orders the nodes: neighbours have fast links between them.

Rings of NCCL, shards and pipeline stages connect neighbouring ranks, so that most of their traffic stays below one
switch. Each node takes part in one pair of a round, so n nodes need n - 1 rounds. Only pairs that were not measured
before are; a restart with the same nodes measures nothing. A link is measured over the channel of one node, which
proves the run's token. The node that measures counts what it receives, so that what waits in buffers does not count.
Both nodes of a pair measure at the same time, as both directions of a ring are busy at the same time.
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimaran.core import Seconds
from trimaran.runs import ChannelClient, RunDirectory, frame
from trimaran.runs.node_records import LinkSpeed, MeasuredLinks, Pair, read_measured_links, write_measured_links

log = logging.getLogger(__name__)

MEASURE_LINK = "measure_link"  # the operation that `serve_link` answers
CONNECT_SECONDS = 5.0
NUM_PINGS = 8
SETTLING_FRACTION = 0.3  # of the time, at its beginning: TCP starts slowly
MAX_SEND_SECONDS = 5.0  # of one measurement, if the other side does not end it
BLOCK_BYTES = 1 << 18
READY, PING, STREAM = b"r", b"p", b"s"


def serve_link(connection: socket.socket) -> None:
    """Answer pings, and then send zeros until the other side has enough. The connection is closed at the end."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(MAX_SEND_SECONDS)
        connection.sendall(READY)  # the rest of the connection is not made of frames
        while (request := connection.recv(1)) == PING:
            connection.sendall(PING)
        until, zeros = time.monotonic() + MAX_SEND_SECONDS, bytes(BLOCK_BYTES)
        while request == STREAM and time.monotonic() < until:
            connection.sendall(zeros)


def measure_link(address: str, token: str, *, seconds: float) -> LinkSpeed:
    """Return the speed of the link from the node whose channel is at `address`. Raises OSError if there is none."""
    connection, _, authenticator = ChannelClient(address, token, seconds=CONNECT_SECONDS).detach()
    with connection:
        connection.sendall(frame({"op": MEASURE_LINK}, authenticator))
        _read_byte(connection, READY)
        round_trip = math.inf
        for _ in range(NUM_PINGS):
            began = time.perf_counter()
            connection.sendall(PING)
            _read_byte(connection, PING)
            round_trip = min(round_trip, time.perf_counter() - began)
        connection.sendall(STREAM)
        began = time.perf_counter()
        settled, end = began + SETTLING_FRACTION * seconds, began + seconds
        block, num_received, counted_from, num_before = bytearray(BLOCK_BYTES), 0, began, 0
        while (now := time.perf_counter()) < end:
            if counted_from == began and now >= settled:
                counted_from, num_before = now, num_received
            connection.settimeout(end - now)
            with contextlib.suppress(TimeoutError):
                received = connection.recv_into(block)
                if not received:
                    raise ConnectionError("the other node ended the measurement")
                num_received += received
        num_counted, took = num_received - num_before, time.perf_counter() - counted_from
        if not num_counted:  # a link so slow that nothing arrived in time
            num_counted, took = max(1, num_received), time.perf_counter() - began
    return LinkSpeed(round_trip=Seconds(round_trip), bytes_per_second=num_counted / took)


def _read_byte(connection: socket.socket, expected: bytes) -> None:
    if connection.recv(1) != expected:
        raise ConnectionError("the other node does not measure links")


MIN_FACTOR = 2.0  # a group's links are at least so many times as fast as those that leave it


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedNodes:
    """Nodes that were merged at `seconds`, the geometric mean of an exchange between its two `parts`."""

    nodes: tuple[str, ...]
    seconds: float = 0.0
    parts: tuple["MergedNodes", ...] = ()


def group_nodes(nodes: Sequence[str], seconds: Mapping[Pair, float]) -> dict[str, tuple[str, ...]]:
    """Return the groups that each node is in, from the largest; the groups have the form of switches."""
    # A group is named after its first node. Differences below `MIN_FACTOR` are noise and make no group. A pair without
    # a time does not count; if two parts have no measured pair, they are as far apart as can be.
    found: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    if len(nodes) > 2:
        # The tree of clusters that begins with single nodes and always merges the two closest.
        clusters = [MergedNodes(nodes=(node,)) for node in sorted(nodes)]
        while len(clusters) > 1:
            pairs = [(left, right) for index, left in enumerate(clusters) for right in clusters[index + 1 :]]
            left, right = min(pairs, key=lambda pair: _between(*pair, seconds))
            merged = MergedNodes(
                nodes=(*left.nodes, *right.nodes), seconds=_between(left, right, seconds), parts=(left, right)
            )
            clusters = [merged if each is left else each for each in clusters if each is not right]
        _add_groups(clusters[0], found)
    return found


def _add_groups(cluster: MergedNodes, found: dict[str, tuple[str, ...]]) -> None:
    """Add the groups inside of `cluster`: parts whose own links are much faster than those between the parts."""
    for part in cluster.parts:
        if part.parts and math.isfinite(part.seconds) and cluster.seconds >= MIN_FACTOR * part.seconds:
            for node in part.nodes:
                found[node] = (*found[node], min(part.nodes))
        _add_groups(part, found)


def _between(left: MergedNodes, right: MergedNodes, seconds: Mapping[Pair, float]) -> float:
    """Return the geometric mean over the pairs with one node in each: one interrupted measurement weighs little."""
    pairs = (frozenset((one, other)) for one in left.nodes for other in right.nodes)
    known = [math.log(seconds[pair]) for pair in pairs if pair in seconds]
    return math.exp(sum(known) / len(known)) if known else math.inf


TOPOLOGY = "TRIMARAN_TOPOLOGY"  # set on each node: its switches from the top, such as `spine1.leaf3`
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


def read_switches(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches above this node, from the top: what the user says, else what Slurm does; empty if unknown."""
    # Slurm writes `spine1.leaf3.node17`, with the pattern `switch.switch.node`.
    if given := environment.get(TOPOLOGY, ""):
        return tuple(given.split("."))
    parts, kinds = (environment.get(name, "").split(".") for name in (SLURM_ADDRESS, SLURM_PATTERN))
    return tuple(part for part, kind in zip(parts, kinds, strict=False) if kind == "switch" and part)


def order_nodes(switches: Mapping[str, Sequence[str]], *, first: str = "") -> list[str]:
    """Return the names of nodes by their switches and names. `first` comes first, and then those closest to it."""
    names = sorted(switches, key=lambda name: (*switches[name], name))
    if not first:
        return names

    def num_shared(name: str) -> int:
        """Return how many switches of a node and of the first are the same, from the top."""
        pairs = [*zip(switches[name], switches[first], strict=False)]
        return next((level for level, (one, other) in enumerate(pairs) if one != other), len(pairs))

    return sorted(names, key=lambda name: (name != first, -num_shared(name)))


MAX_SECONDS = 10.0  # for all rounds
PAIR_SECONDS, MIN_PAIR_SECONDS = 0.3, 0.05  # in which a link is busy; shorter with many nodes
OVERHEAD_SECONDS = 0.15  # of a round: commands, connections, answers
ANSWER_SECONDS = 5.0  # later answers do not count
POLL_SECONDS = 0.01


class LinkNode(Protocol):
    """A node that can measure its link to another one: this machine (`OwnLinks`), or a `RemoteNode`."""

    name: str
    channel_address: str

    def measure_link(self, peer: str, address: str, *, seconds: float) -> None:
        """Begin to measure the link from `peer`, whose channel is at `address`."""

    def take_links(self) -> dict[str, LinkSpeed | None]:
        """Return the links that were measured since the last call, by peer; None for one that failed."""


@dataclass(slots=True)
class OwnLinks:
    """Measures links of this machine."""

    name: str
    channel_address: str
    token: str
    _found: dict[str, LinkSpeed | None] = field(default_factory=dict)

    def measure_link(self, peer: str, address: str, *, seconds: float) -> None:
        start_measuring(peer, address, self.token, seconds=seconds, then=self._found.__setitem__)

    def take_links(self) -> dict[str, LinkSpeed | None]:
        return {peer: self._found.pop(peer) for peer in [*self._found]}


def start_measuring(
    peer: str, address: str, token: str, *, seconds: float, then: Callable[[str, LinkSpeed | None], None]
) -> None:
    """Measure the link from `peer` in a thread, and call `then` with it; with None if it cannot be measured."""

    def measure() -> None:
        link = None
        try:
            link = measure_link(address, token, seconds=seconds)
        except (OSError, ValueError) as error:
            log.warning("the link from %s at %s was not measured: %s", peer, address, error)
        then(peer, link)

    threading.Thread(target=measure, name="measure-link", daemon=True).start()


def tournament(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs, so that each name meets each other once and is in one pair of a round at most."""
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(left, right) for left, right in facing if left is not None and right is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]  # the first keeps its seat
    return rounds


def order_by_links(
    run: RunDirectory, nodes: Sequence[LinkNode], *, first: str = "", is_over: Callable[[], bool]
) -> dict[str, tuple[str, ...]]:
    """Return each node's groups by links, measured if not yet known, and write them. `is_over` ends that early."""
    by_name, known, began = {node.name: node for node in nodes}, read_measured_links(run), time.monotonic()
    names = [*by_name]
    rounds = [[pair for pair in each if frozenset(pair) not in known.links] for each in tournament(names)]
    missing, links = [each for each in rounds if each], dict(known.links)
    seconds = min(PAIR_SECONDS, MAX_SECONDS / max(1, len(missing)) - OVERHEAD_SECONDS)
    if seconds < MIN_PAIR_SECONDS:
        log.warning("%d nodes are too many to measure all links between them: they are ordered by name; name their "
                    "switches in TRIMARAN_TOPOLOGY", len(nodes))  # fmt: skip
        return dict.fromkeys(names, ())
    until = began + MAX_SECONDS + ANSWER_SECONDS
    for pairs in missing:
        if is_over() or time.monotonic() > until:
            break
        ways = [way for left, right in pairs for way in ((left, right), (right, left))]
        for name, peer in ways:
            by_name[name].take_links()  # a late answer of an earlier round
            by_name[name].measure_link(peer, by_name[peer].channel_address, seconds=seconds)
        found: dict[tuple[str, str], LinkSpeed | None] = {}
        answered_by = time.monotonic() + seconds + ANSWER_SECONDS
        while len(found) < len(ways) and time.monotonic() < answered_by:
            time.sleep(POLL_SECONDS)
            for name, peer in ways:
                found |= {(name, each): link for each, link in by_name[name].take_links().items() if each == peer}
        for left, right in pairs:
            one, other = found.get((left, right)), found.get((right, left))
            if one and other:  # the slower direction counts
                links[frozenset((left, right))] = LinkSpeed(
                    round_trip=min(one.round_trip, other.round_trip),
                    bytes_per_second=min(one.bytes_per_second, other.bytes_per_second),
                )
    groups = group_nodes(names, {pair: link.exchange_seconds for pair, link in links.items()})
    took = round(time.monotonic() - began, 3) if missing else known.seconds
    order = order_nodes(groups, first=first)
    if missing or tuple(order) != tuple(known.order):
        write_measured_links(run, MeasuredLinks(links=links, groups=list_groups(groups), order=order, seconds=took))
    how = f"measured in {took:.1f} s" if missing else "measured before"
    log.info("links between %d nodes, %s: the order is %s", len(names), how, ", ".join(order))
    return groups


def list_groups(groups: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the nodes of each group, the smaller groups inside of a larger one too."""
    paths = {tuple(path[: level + 1]) for path in groups.values() for level in range(len(path))}
    return [
        tuple(sorted(name for name in groups if tuple(groups[name][: len(path)]) == path)) for path in sorted(paths)
    ]

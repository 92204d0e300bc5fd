"""Measures the links between the nodes of a run, in rounds of pairs, for the order of nodes.

Each node takes part in one pair of a round. So n nodes need n - 1 rounds, and all pairs of a round measure at the same
time. Only pairs that were not measured before are; a restart with the same nodes measures nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimaran.core import Seconds
from trimaran.launch.supervise.link_probe import measure_link
from trimaran.launch.supervise.node_groups import group_nodes
from trimaran.launch.supervise.node_order import order_nodes
from trimaran.runs import RunDirectory
from trimaran.runs.measured_links import LinkSpeed, MeasuredLinks, Pair, read_measured_links, write_measured_links

log = logging.getLogger(__name__)

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
        ...

    def take_links(self) -> dict[str, LinkSpeed | None]:
        """Return the links that were measured since the last call, by peer; None for one that failed."""
        ...


@dataclass(slots=True)
class OwnLinks:
    """Measures links of this machine, each in a thread."""

    name: str
    channel_address: str
    token: str
    _found: dict[str, LinkSpeed | None] = field(default_factory=dict)

    def measure_link(self, peer: str, address: str, *, seconds: float) -> None:
        def measure() -> None:
            self._found[peer] = try_to_measure(peer, address, self.token, seconds=seconds)

        threading.Thread(target=measure, name="measure-link", daemon=True).start()

    def take_links(self) -> dict[str, LinkSpeed | None]:
        return {peer: self._found.pop(peer) for peer in [*self._found]}


def try_to_measure(peer: str, address: str, token: str, *, seconds: float) -> LinkSpeed | None:
    """Return the speed of the link from `peer`; None, and a warning, if it cannot be measured."""
    try:
        return measure_link(address, token, seconds=seconds)
    except (OSError, ValueError) as error:
        log.warning("the link from %s at %s was not measured: %s", peer, address, error)
        return None


def link_record(peer: str, link: LinkSpeed | None) -> dict[str, Any]:
    """Return a measured link as a message to the coordinator."""
    speed = {"round_trip": link.round_trip, "bytes_per_second": link.bytes_per_second} if link else {}
    return {"peer": peer, **speed}


def link_of_record(record: Mapping[str, Any]) -> LinkSpeed | None:
    """Return the link in a record of `link_record`."""
    if "bytes_per_second" not in record:
        return None
    return LinkSpeed(round_trip=Seconds(record["round_trip"]), bytes_per_second=record["bytes_per_second"])


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
    """Return the groups of each node by measured links, and write them to the run directory.

    The pairs that the run directory does not have are measured. `is_over` ends that early.
    """
    names, known, began = [node.name for node in nodes], read_measured_links(run), time.monotonic()
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
        links |= _measure_round(nodes, pairs, seconds=seconds)
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


def _measure_round(
    nodes: Sequence[LinkNode], pairs: Sequence[tuple[str, str]], *, seconds: float
) -> dict[Pair, LinkSpeed]:
    """Return the links of the pairs, without those that one side could not measure. The slower direction counts."""
    by_name = {node.name: node for node in nodes}
    ways = [way for left, right in pairs for way in ((left, right), (right, left))]
    for name, peer in ways:
        by_name[name].take_links()  # a late answer of an earlier round
        by_name[name].measure_link(peer, by_name[peer].channel_address, seconds=seconds)
    found: dict[tuple[str, str], LinkSpeed | None] = {}
    until = time.monotonic() + seconds + ANSWER_SECONDS
    while len(found) < len(ways) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        for name, peer in ways:
            found |= {(name, each): link for each, link in by_name[name].take_links().items() if each == peer}
    slower: dict[Pair, LinkSpeed] = {}
    for left, right in pairs:
        one, other = found.get((left, right)), found.get((right, left))
        if one and other:
            slower[frozenset((left, right))] = LinkSpeed(
                round_trip=min(one.round_trip, other.round_trip),
                bytes_per_second=min(one.bytes_per_second, other.bytes_per_second),
            )
    return slower

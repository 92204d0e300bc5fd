"""The measured links between the nodes of a run, and the order of nodes that follows: a file of its directory."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import Seconds
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.run_directory import RunDirectory, writing

MAX_BYTES = 4 << 20
EXCHANGED_BYTES = 1 << 20  # the size of an exchange by whose time links are compared
Pair = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """How fast a link is: the shortest round trip, and bytes per second one way while both ways are busy."""

    round_trip: Seconds
    bytes_per_second: float

    @property
    def exchange_seconds(self) -> Seconds:
        """How long an exchange of a megabyte takes."""
        return Seconds(self.round_trip + EXCHANGED_BYTES / self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The links by pair of node names. `groups` have nodes with fast links; `order` is that of the ranks."""

    links: Mapping[Pair, LinkSpeed] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] = ()
    order: Sequence[str] = ()
    seconds: float = 0.0  # that the last measurement took

    @property
    def exchange_seconds(self) -> dict[Pair, float]:
        """How long an exchange takes, by pair."""
        return {pair: link.exchange_seconds for pair, link in self.links.items()}

    def as_dict(self) -> dict[str, Any]:
        links = sorted((sorted(pair), link) for pair, link in self.links.items())
        return {
            "order": [*self.order],
            "groups": [[*group] for group in self.groups],
            "links": [
                {"nodes": pair, "round_trip": link.round_trip, "bytes_per_second": link.bytes_per_second}
                for pair, link in links
            ],
            "seconds": self.seconds,
        }


def read_measured_links(run: RunDirectory) -> MeasuredLinks:
    """Return what was measured; nothing if the file is missing or damaged, so that it is measured again."""
    if not run.measured_links.exists():
        return MeasuredLinks()
    try:
        tree = json.loads(read_regular_bytes(run.measured_links, limit_bytes=MAX_BYTES))
        links = {frozenset(map(str, each["nodes"])): _link(each) for each in tree["links"]}
        groups = tuple(tuple(map(str, group)) for group in tree["groups"])
        order = tuple(map(str, tree["order"]))
        return MeasuredLinks(links=links, groups=groups, order=order, seconds=float(tree["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return MeasuredLinks()


def write_measured_links(run: RunDirectory, measured: MeasuredLinks) -> None:
    """Replace the file of measured links."""
    path = run.measured_links
    with writing(run):
        write_atomically(path, json.dumps(measured.as_dict(), indent=1))


def _link(each: Mapping[str, Any]) -> LinkSpeed:
    round_trip, rate = float(each["round_trip"]), float(each["bytes_per_second"])
    if not (0 <= round_trip < math.inf and 0 < rate < math.inf and len(set(each["nodes"])) == 2):
        raise ValueError("a link without a speed")
    return LinkSpeed(round_trip=Seconds(round_trip), bytes_per_second=rate)

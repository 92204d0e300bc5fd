"""What runs know of nodes: those to avoid, those left out, how fast each computes, and the links between them."""

import fcntl
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trimaran.core import Seconds, open_regular_fd, read_regular_bytes, write_atomically
from trimaran.runs.journal import read_json_lines
from trimaran.runs.record_types import DAMAGED
from trimaran.runs.run_directory import RunDirectory, writing

VARIABLE = "TRIMARAN_BAD_NODES"
Kind = Literal["hardware", "lost", "cleared"]
KINDS = ("hardware", "lost", "cleared")
MIN_LOSSES, LOSS_SECONDS = 3, 24 * 3600.0
MEMORY_SECONDS = 7 * 24 * 3600.0
MAX_TEXT = 500
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")  # it is passed on to schedulers and shown on terminals


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """What a run saw of a node, named as the scheduler names it. `expires` and `time` are seconds since the epoch.

    `hardware`: a part of it is broken. `lost`: it was gone without notice. `cleared`: a person says that it is good.
    """

    node: str
    kind: Kind
    why: str
    time: float
    expires: float
    run: str = ""
    incident: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """A node to avoid until `expires`, and what was seen of it, the newest last."""

    node: str
    why: str
    expires: float
    observations: tuple[NodeObservation, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bad_nodes_file(environment: Mapping[str, str]) -> Path:
    """Return the file of the bad-node memory."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    state = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    return Path(state) / "trimaran" / "bad-nodes.jsonl"


def observe(node: str, kind: Kind, why: str, *, run: str = "", incident: str = "") -> NodeObservation:
    """Return an observation of this moment."""
    now = time.time()
    seconds = LOSS_SECONDS if kind == "lost" else MEMORY_SECONDS
    return NodeObservation(
        node=node, kind=kind, why=why[:MAX_TEXT], time=now, expires=now + seconds, run=run, incident=incident
    )


def add_observation(path: Path, observation: NodeObservation) -> None:
    """Append an observation. Several coordinators may do so at once, also on different machines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(asdict(observation)) + "\n").encode()
    fd = open_regular_fd(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, mode=0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that was cut off stays the only one that is lost
        os.write(fd, line)
    finally:
        os.close(fd)


def read_bad_nodes(path: Path) -> dict[str, BadNode]:
    """Return the nodes to avoid now, by name. An unreadable file has none: it must not keep a run from starting."""
    seen: dict[str, list[NodeObservation]] = defaultdict(list)
    now = time.time()
    try:
        for tree in read_json_lines(path):
            each = _observation(tree)
            if each is not None and each.kind == "cleared":
                seen.pop(each.node, None)
            elif each is not None and each.expires > now:
                seen[each.node].append(each)
    except OSError:
        return {}
    bad = {}
    for node, observations in sorted(seen.items()):
        broken = [each for each in observations if each.kind == "hardware"]
        losses = [each for each in observations if each.kind == "lost"]
        if broken:
            why, expires = broken[-1].why, broken[-1].expires
        elif len(losses) >= MIN_LOSSES:
            why = f"lost {len(losses)} times within a day, last: {losses[-1].why}"
            expires = losses[-MIN_LOSSES].expires
        else:
            continue
        bad[node] = BadNode(node=node, why=why, expires=expires, observations=tuple(observations))
    return bad


def _observation(tree: dict[str, Any]) -> NodeObservation | None:
    """Return the observation of a line; None if it is not one."""
    names = {each.name for each in fields(NodeObservation)}
    known = {name: value for name, value in tree.items() if name in names}
    texts = all(isinstance(known.get(name), str) for name in ("node", "kind", "why"))
    more = all(isinstance(known.get(name, ""), str) for name in ("run", "incident"))
    times = all(type(known.get(name)) in (int, float) for name in ("time", "expires"))
    if not (texts and more and times) or known["kind"] not in KINDS or not HOST_NAME.fullmatch(known["node"]):
        return None
    return NodeObservation(**known)


LEFT_OUT_FIELD = "nodes.left_out"  # as a decision of the autopilot names it
MAX_BYTES = 1 << 20


def read_left_out(run: RunDirectory) -> frozenset[str]:
    """Return the host names of the nodes to leave out; none if the file is missing or damaged."""
    with suppress(*DAMAGED):
        hosts = json.loads(read_regular_bytes(run.left_out_nodes, limit_bytes=MAX_BYTES))["hosts"]
        return frozenset(str(each) for each in hosts)
    return frozenset()


def write_left_out(run: RunDirectory, hosts: Iterable[str], *, reason: str = "") -> None:
    """Leave these nodes out, and no others; the supervisor starts the ranks again if that changes anything."""
    path, names = run.left_out_nodes, sorted(hosts)
    with writing(run):
        if not names:
            path.unlink(missing_ok=True)
            return
        write_atomically(path, json.dumps({"hosts": names, "reason": reason}))


MAX_KEPT = 8  # measurements of a node: the first one, and the last ones
CONFIRMING = 2  # measurements in a row that must agree
MIN_SPEEDUP = 1.5  # times as fast as when it was left out


def read_node_speeds(run: RunDirectory) -> dict[str, tuple[float, ...]]:
    """Return the measured speeds by host name, the first of which is from when it was left out."""
    with suppress(*DAMAGED):
        hosts = json.loads(read_regular_bytes(run.node_speeds, limit_bytes=MAX_BYTES))["hosts"]
        found = {str(host): tuple(map(float, speeds)) for host, speeds in hosts.items()}
        if all(0 < each < math.inf for speeds in found.values() for each in speeds):
            return found
    return {}


def write_node_speeds(run: RunDirectory, speeds: Mapping[str, Sequence[float]]) -> None:
    """Replace the file."""
    with writing(run):
        write_atomically(run.node_speeds, json.dumps({"hosts": {host: [*each] for host, each in speeds.items()}}))


def add_speed(speeds: Sequence[float], speed: float) -> tuple[float, ...]:
    """Return the speeds of a node with a new one."""
    return (*speeds[:1], *speeds[1:][2 - MAX_KEPT :], speed)


def speedup_of(speeds: Sequence[float]) -> float:
    """Return how many times as fast a node is now as when it was left out, by its last measurements; 1 if unknown."""
    if len(speeds) <= CONFIRMING:
        return 1.0
    return min(speeds[-CONFIRMING:]) / speeds[0]


def has_recovered(speeds: Sequence[float]) -> bool:
    """Return whether a node is clearly faster than when it was left out, in several measurements in a row."""
    return speedup_of(speeds) >= MIN_SPEEDUP


MAX_LINKS_BYTES = 4 << 20
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
    with suppress(*DAMAGED):
        tree = json.loads(read_regular_bytes(run.measured_links, limit_bytes=MAX_LINKS_BYTES))
        links = {frozenset(map(str, each["nodes"])): _link(each) for each in tree["links"]}
        groups = tuple(tuple(map(str, group)) for group in tree["groups"])
        order = tuple(map(str, tree["order"]))
        return MeasuredLinks(links=links, groups=groups, order=order, seconds=float(tree["seconds"]))
    return MeasuredLinks()


def write_measured_links(run: RunDirectory, measured: MeasuredLinks) -> None:
    """Replace the file of measured links."""
    with writing(run):
        write_atomically(run.measured_links, json.dumps(measured.as_dict(), indent=1))


def _link(each: Mapping[str, Any]) -> LinkSpeed:
    round_trip, rate = float(each["round_trip"]), float(each["bytes_per_second"])
    if not (0 <= round_trip < math.inf and 0 < rate < math.inf and len(set(each["nodes"])) == 2):
        raise ValueError("a link without a speed")
    return LinkSpeed(round_trip=Seconds(round_trip), bytes_per_second=rate)

"""The bad-node memory: nodes that failed in a run, which later runs avoid. Imports no torch.

One JSON line for each observation, in a file that the runs of a user share: `$TRIMARAN_BAD_NODES`, or `bad-nodes.jsonl`
in the user's state folder. A broken part makes a node bad at once. A lost node is often a preempted one, so a loss only
counts towards `MIN_LOSSES` within a day. A node is forgotten after `MEMORY_SECONDS`, or when a person says so.
"""

import fcntl
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from trimaran.core.regular_files import open_regular_fd
from trimaran.runs.journal import JsonlFollower

VARIABLE = "TRIMARAN_BAD_NODES"
Kind = Literal["hardware", "lost", "cleared"]
KINDS = ("hardware", "lost", "cleared")
MIN_LOSSES, LOSS_SECONDS = 3, 24 * 3600.0
MEMORY_SECONDS = 7 * 24 * 3600.0
MAX_TEXT = 500


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
    """Return the nodes to avoid now, by name. Lines that are not observations are skipped.

    A file that cannot be read has none: it must not keep a run from starting.
    """
    seen: dict[str, list[NodeObservation]] = defaultdict(list)
    now = time.time()
    try:
        for tree in JsonlFollower(path).new():
            each = _observation(tree)
            if each is not None and each.kind == "cleared":
                seen.pop(each.node, None)
            elif each is not None and each.expires > now:
                seen[each.node].append(each)
    except OSError:
        return {}
    return {node: bad for node, each in sorted(seen.items()) if (bad := _judge(node, each)) is not None}


def _judge(node: str, observations: list[NodeObservation]) -> BadNode | None:
    broken = [each for each in observations if each.kind == "hardware"]
    losses = [each for each in observations if each.kind == "lost"]
    if broken:
        return BadNode(node=node, why=broken[-1].why, expires=broken[-1].expires, observations=tuple(observations))
    if len(losses) < MIN_LOSSES:
        return None
    why = f"lost {len(losses)} times within a day, last: {losses[-1].why}"
    return BadNode(node=node, why=why, expires=losses[-MIN_LOSSES].expires, observations=tuple(observations))


def _observation(tree: dict[str, Any]) -> NodeObservation | None:
    """Return the observation of a line; None if it is not one."""
    names = {each.name for each in fields(NodeObservation)}
    known = {name: value for name, value in tree.items() if name in names}
    texts = all(isinstance(known.get(name), str) for name in ("node", "kind", "why"))
    more = all(isinstance(known.get(name, ""), str) for name in ("run", "incident"))
    times = all(type(known.get(name)) in (int, float) for name in ("time", "expires"))
    if not (texts and more and times) or known["kind"] not in KINDS or not _is_name(known["node"]):
        return None
    return NodeObservation(**known)


def _is_name(node: str) -> bool:
    """Return whether `node` can be a host name: it is passed on to schedulers and shown on terminals."""
    return 0 < len(node) <= 253 and node.isascii() and all(each.isalnum() or each in ".-_" for each in node) and (
        node[0].isalnum()
    )  # fmt: skip

"""Nodes that a run goes on without, although they are there, and how fast they compute now: two files of a run."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.run_directory import RunDirectory, writing

LEFT_OUT_FIELD = "nodes.left_out"  # as a decision of the autopilot names it
MAX_BYTES = 1 << 20
MAX_KEPT = 8  # measurements of a node: the first one, and the last ones
CONFIRMING = 2  # measurements in a row that must agree
MIN_SPEEDUP = 1.5  # times as fast as when it was left out


def read_left_out(run: RunDirectory) -> frozenset[str]:
    """Return the host names of the nodes to leave out; none if the file is missing or damaged."""
    try:
        return frozenset(str(each) for each in _read_hosts(run.left_out_nodes))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def write_left_out(run: RunDirectory, hosts: Iterable[str], *, reason: str = "") -> None:
    """Leave these nodes out, and no others; the supervisor starts the ranks again if that changes anything."""
    names = sorted(hosts)
    with writing(run):
        if not names:
            run.left_out_nodes.unlink(missing_ok=True)
            return
        write_atomically(run.left_out_nodes, json.dumps({"hosts": names, "reason": reason}))


def read_node_speeds(run: RunDirectory) -> dict[str, tuple[float, ...]]:
    """Return the measured speeds by host name, the first of which is from when it was left out."""
    try:
        hosts = _read_hosts(run.node_speeds)
        return {str(host): tuple(_positive(each) for each in speeds) for host, speeds in hosts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write_node_speeds(run: RunDirectory, speeds: Mapping[str, Sequence[float]]) -> None:
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


def _read_hosts(path: Path) -> Any:
    return json.loads(read_regular_bytes(path, limit_bytes=MAX_BYTES))["hosts"]


def _positive(value: float) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError("a speed is a positive number")
    return float(value)

"""How fast nodes that were left out compute now, compared with when they were left out: a file of the run directory."""

import json
import math
import os
from collections.abc import Mapping, Sequence

from trimaran.core.regular_files import read_regular_bytes
from trimaran.runs.run_directory import RunDirectory, writing

MAX_BYTES = 1 << 20
MAX_KEPT = 8  # measurements of a node: the first one, and the last ones
CONFIRMING = 2  # measurements in a row that must agree
MIN_SPEEDUP = 1.5  # times as fast as when it was left out


def read_node_speeds(run: RunDirectory) -> dict[str, tuple[float, ...]]:
    """Return the measured speeds by host name, the first of which is from when it was left out."""
    if not run.node_speeds.exists():
        return {}
    try:
        hosts = json.loads(read_regular_bytes(run.node_speeds, limit_bytes=MAX_BYTES))["hosts"]
        return {str(host): tuple(_positive(each) for each in speeds) for host, speeds in hosts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write_node_speeds(run: RunDirectory, speeds: Mapping[str, Sequence[float]]) -> None:
    """Replace the file."""
    path = run.node_speeds
    with writing(run):
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.write_text(json.dumps({"hosts": {host: [*each] for host, each in speeds.items()}}), encoding="utf-8")
        draft.replace(path)


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


def _positive(value: float) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError("a speed is a positive number")
    return float(value)

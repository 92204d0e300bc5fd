"""Nodes that a run goes on without, although they are there: a file of its directory with their host names."""

import json
import os
from collections.abc import Iterable

from trimaran.core.regular_files import read_regular_bytes
from trimaran.runs.run_directory import RunDirectory, writing

LEFT_OUT_FIELD = "nodes.left_out"  # as a decision of the autopilot names it
MAX_BYTES = 1 << 20


def read_left_out(run: RunDirectory) -> frozenset[str]:
    """Return the host names of the nodes to leave out; none if the file is missing or damaged."""
    if not run.left_out_nodes.exists():
        return frozenset()
    try:
        hosts = json.loads(read_regular_bytes(run.left_out_nodes, limit_bytes=MAX_BYTES))["hosts"]
        return frozenset(str(each) for each in hosts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def write_left_out(run: RunDirectory, hosts: Iterable[str], *, reason: str = "") -> None:
    """Leave these nodes out, and no others; the supervisor starts the ranks again if that changes anything."""
    path, names = run.left_out_nodes, sorted(hosts)
    with writing(run):
        if not names:
            path.unlink(missing_ok=True)
            return
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.write_text(json.dumps({"hosts": names, "reason": reason}), encoding="utf-8")
        draft.replace(path)

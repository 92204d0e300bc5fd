"""Reads the profiles of a run: synchronisations of host and device in traces, and snapshots of memory."""

import gzip
import json
import logging
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import open_regular_file, read_regular_text

log = logging.getLogger(__name__)

MAX_TRACE_BYTES = 128 << 20  # uncompressed; larger traces are not read
SCALAR_READ = "aten::_local_scalar_dense"  # `.item()` and the like
# Calls that make the host wait for the device.
SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", SCALAR_READ)
MAX_SNAPSHOTS = 16  # the newest
MAX_SNAPSHOT_BYTES = 16 << 20
SNAPSHOT_NAME = re.compile(r"memory-step-\d+-rank-(\d+)\.json")
PHASES = ("forward", "backward")  # elsewhere the optimizer and the loop read scalars on purpose


def read_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a summary of each trace: `file`, `steps`, `waits` by call, `places` and `wait_seconds`, over all steps.

    Files that are not our traces are skipped.
    """
    for path in sorted(folder.glob("step-*-rank-*.trace.json.gz")):
        try:
            about = path.stat()
            facts = _facts(path, about.st_mtime_ns, about.st_size)
        except (OSError, ValueError, EOFError, zlib.error, KeyError, TypeError, AttributeError) as error:
            log.warning("cannot read the trace %s: %r", path, error)
            continue
        if facts:
            yield facts


@lru_cache(maxsize=64)
def _facts(path: Path, changed: int, size: int) -> dict[str, Any]:
    """Return the summary of a trace. `changed` and `size` are keys of the cache: an unchanged file is read once."""
    with open_regular_file(path, follow_links=True) as packed, gzip.open(packed) as file:
        raw = file.read(MAX_TRACE_BYTES + 1)
    if len(raw) > MAX_TRACE_BYTES:
        return {}
    tree = json.loads(raw)
    about = tree["trimaran"]
    first, last = about["steps"]
    spans = sorted((begin, end, phase) for _, phase, begin, end in about["phases"] if phase in PHASES)
    base = int(tree.get("baseTimeNanoseconds") or 0)
    waits: Counter[str] = Counter()
    places: Counter[str] = Counter()
    seconds, before, busy_until = 0.0, "", 0.0
    events = sorted((each for each in tree["traceEvents"] if each.get("ph") == "X"), key=lambda each: each["ts"])
    # On a GPU the trace has the CUDA call itself, and reading a scalar of a CPU tensor costs nothing.
    calls = {each["name"] for each in events if each["name"] in SYNC_CALLS}
    calls = calls - {SCALAR_READ} or calls
    for event in events:
        if event["name"] in calls and (phase := _phase(spans, base + event["ts"] * 1e3)):
            waits[event["name"]] += 1
            places[f"{phase}, after {before}"] += 1
            seconds += event.get("dur", 0.0) / 1e6
        elif event.get("cat") == "cpu_op" and event["ts"] >= busy_until and event["name"] != "aten::item":
            before, busy_until = event["name"], event["ts"] + event.get("dur", 0.0)
    return {
        "file": path.name,
        "steps": last - first + 1,
        "waits": dict(waits),
        "places": dict(places.most_common(5)),
        "wait_seconds": seconds,
    }


def _phase(spans: list[tuple[int, int, str]], moment: float) -> str:
    """Return the phase at a moment, in nanoseconds since the epoch; '' if it is in none of `spans`."""
    index = bisect_right(spans, (moment, float("inf"), "")) - 1
    return spans[index][2] if index >= 0 and spans[index][1] >= moment else ""


def read_snapshots(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest snapshots by time, each with its `rank`. Files that are not our snapshots are skipped."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("memory-step-*-rank-*.json"))[-MAX_SNAPSHOTS:]:
        name = SNAPSHOT_NAME.fullmatch(path.name)
        try:
            tree = json.loads(read_regular_text(path)) if path.stat().st_size <= MAX_SNAPSHOT_BYTES else None
        except (OSError, ValueError):
            continue
        if name and isinstance(tree, dict) and isinstance(tree.get("time"), int | float):
            found.append(tree | {"rank": int(name[1]), "file": path.name})
    yield from sorted(found, key=lambda each: each["time"])

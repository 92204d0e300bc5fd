"""Summarises torch's memory snapshot: which modules and lines of code hold a device's memory.

The input is the dictionary of `torch.cuda.memory._snapshot()` and the owners of known addresses. The output is JSON:
the largest holders by module and by line, now and at the peak, and a timeline of allocated bytes.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 20
MAX_TIMELINE_POINTS = 1000
HELD_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")
# Files of torch and Python that are in the stack of every allocation.
INTERNAL_FILES = re.compile(
    r"/torch/(nn/modules/module|nn/functional|_ops|_dynamo|utils|autograd|_compile|_tensor|optim/optimizer)"
    r"|/contextlib\.py|/functools\.py|^<|\?\?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """The owner of an address range: `kind` is parameters, gradients, states or activations, of `module`."""

    address: int
    num_bytes: int
    kind: str
    module: str


class ByteTotals:
    """Bytes and counts by key."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Any, ...], list[int]] = {}

    def add(self, key: tuple[Any, ...], num_bytes: int) -> None:
        row = self._totals.setdefault(key, [0, 0])
        row[0] += num_bytes
        row[1] += 1

    def rows(self, *names: str, most: int = MAX_ROWS) -> list[dict[str, Any]]:
        """Return the largest, each with its key under `names`, bytes and count."""
        largest = sorted(self._totals.items(), key=lambda each: -each[1][0])[:most]
        return [dict(zip(names, key, strict=True)) | {"bytes": row[0], "count": row[1]} for key, row in largest]


def by_module(owners: Iterable[MemoryOwner]) -> list[dict[str, Any]]:
    """Return the largest holders among `owners`."""
    sums = ByteTotals()
    for each in owners:
        sums.add((each.kind, each.module), each.num_bytes)
    return sums.rows("kind", "module")


def by_kind(owners: Iterable[MemoryOwner]) -> dict[str, int]:
    found = Counter[str]()
    for each in owners:
        found[each.kind] += each.num_bytes
    return dict(found)


def read_snapshot(snapshot: Mapping[str, Any], owners: Sequence[MemoryOwner], *, device: int = 0) -> dict[str, Any]:
    """Return what holds the memory of a device, now and, if the history was recorded, at its peak.

    `holders` are blocks with an owner; blocks without one are in `lines`, by the line of code that allocated them, if
    the history has it. Sizes are those of the allocator's blocks.
    """
    segments = [each for each in snapshot.get("segments", ()) if each.get("device", 0) == device]
    blocks = [block for each in segments for block in each.get("blocks", ()) if block.get("state") in HELD_STATES]
    owners = sorted(owners, key=lambda each: each.address)
    starts = [each.address for each in owners]
    known, lines, unknown = ByteTotals(), ByteTotals(), 0
    for block in blocks:
        # A block may begin before the owner's range, but not after it.
        index = bisect_right(starts, block["address"] + block["size"] - 1) - 1
        owner = owners[index] if index >= 0 else None
        if owner is not None and owner.address + owner.num_bytes > block["address"]:
            known.add((owner.kind, owner.module), block["size"])
        else:
            unknown += block["size"]
            lines.add(_code_line(block.get("frames", ())), block["size"])
    reserved = sum(each.get("total_size", 0) for each in segments)
    allocated = sum(block["size"] for block in blocks)
    traces = snapshot.get("device_traces", ())
    history = traces[device] if device < len(traces) else ()
    # A segment that is partly in use cannot be freed, nor hold an allocation larger than its free blocks.
    idle = sum(
        each.get("total_size", 0) for each in segments if not any(b.get("state") in HELD_STATES for b in each["blocks"])
    )
    return {
        "allocated": allocated,
        "reserved": reserved,
        "in_holes": max(0, reserved - allocated - idle),
        "unknown": unknown,
        "holders": known.rows("kind", "module"),
        "lines": lines.rows("file", "line", "function"),
    } | _timeline(history, allocated)


def downsample(points: Sequence[tuple[float, int]], most: int = MAX_TIMELINE_POINTS) -> list[tuple[float, int]]:
    """Return at most about `most` of `points`: the lowest and the highest of each interval."""
    if len(points) <= most:
        return list(points)
    size, kept = -(-2 * len(points) // most), []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        ends = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


def _timeline(history: Sequence[Mapping[str, Any]], allocated: int) -> dict[str, Any]:
    """Return the timeline of allocated bytes and the holders at its peak; empty without a history."""
    actions = [each for each in history if each.get("action") in ("alloc", "free_completed")]
    if not actions:
        return {"timeline": [], "peak": None}
    sign = {"alloc": 1, "free_completed": -1}
    start = level = allocated - sum(sign[each["action"]] * each["size"] for each in actions)
    points, began = [(0.0, start)], actions[0].get("time_us", 0)
    peak, peak_at = start, -1
    for index, each in enumerate(actions):
        level += sign[each["action"]] * each["size"]
        points.append(((each.get("time_us", 0) - began) / 1e6, level))
        if level > peak:
            peak, peak_at = level, index
    timeline = [{"seconds": round(seconds, 6), "allocated": level} for seconds, level in downsample(points)]
    # What is allocated at the peak: by line, and the bytes from before the history.
    live: dict[int, Mapping[str, Any]] = {}
    for each in actions[: peak_at + 1]:
        if each["action"] == "alloc":
            live[each["addr"]] = each
        else:
            live.pop(each["addr"], None)
    lines = ByteTotals()
    for each in live.values():
        lines.add(_code_line(each.get("frames", ())), each["size"])
    before = peak - sum(each["size"] for each in live.values())
    rows = lines.rows("file", "line", "function")
    return {"timeline": timeline, "peak": {"allocated": peak, "from_before": before, "lines": rows}}


def _code_line(frames: Sequence[Mapping[str, Any]]) -> tuple[str, int, str]:
    """Return (file, line, function) of the allocation, outside torch's internals if possible; none if only C++."""
    ours = [each for each in frames if str(each.get("filename", "")).endswith(".py")]
    if ours:
        frame = next((each for each in ours if not INTERNAL_FILES.search(str(each["filename"]))), ours[0])
        return str(frame["filename"]), int(frame.get("line", 0)), str(frame.get("name", ""))
    return "", 0, "unknown" if not frames else str(frames[0].get("name", ""))

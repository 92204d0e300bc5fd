"""Who holds a device's memory: torch's own snapshot of its allocator, made into something that a person can read.

What goes in is the dictionary that `torch.cuda.memory._snapshot()` returns, and whose addresses are known; what comes
out is plain JSON: the largest holders by module and by line, now and at the peak, and how much was held when.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOP = 20
POINTS = 1000
FRAMES = 6
HELD = ("active_allocated", "active_pending_free", "active_awaiting_free")
# Corridors: what is on the way to every tensor says nothing about one.
CORRIDOR = re.compile(
    r"/torch/(nn/modules/module|nn/functional|_ops|_dynamo|utils|autograd|_compile|_tensor|optim/optimizer)"
    r"|/contextlib\.py|/functools\.py|^<|\?\?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Memory that is known: `kind` is parameters, gradients, states or activations, of `module`."""

    address: int
    num_bytes: int
    kind: str
    module: str


class Sums:
    """Bytes and counts by what they are for."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, ...], list[int]] = {}

    def add(self, key: tuple[Any, ...], num_bytes: int) -> None:
        row = self._sums.setdefault(key, [0, 0])
        row[0] += num_bytes
        row[1] += 1

    def rows(self, *names: str, top: int = TOP) -> list[dict[str, Any]]:
        """Return the largest, each with its names, bytes and count."""
        order = sorted(self._sums.items(), key=lambda each: -each[1][0])[:top]
        return [dict(zip(names, key, strict=True)) | {"bytes": sums[0], "count": sums[1]} for key, sums in order]


def by_module(owners: Iterable[Owner]) -> list[dict[str, Any]]:
    """Return the largest holders among `owners`."""
    sums = Sums()
    for each in owners:
        sums.add((each.kind, each.module), each.num_bytes)
    return sums.rows("kind", "module")


def by_kind(owners: Iterable[Owner]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in owners:
        found[each.kind] = found.get(each.kind, 0) + each.num_bytes
    return found


def read_snapshot(snapshot: Mapping[str, Any], owners: Sequence[Owner], *, device: int = 0) -> dict[str, Any]:
    """Return who holds the memory of a device, now and, where the history was recorded, at its peak.

    `holders` are what `owners` tell of; what is nobody's is told by `lines`, the line of code that asked for it, which
    only the history knows. Sizes are those of the allocator's blocks.
    """
    segments = [each for each in snapshot.get("segments", ()) if each.get("device", 0) == device]
    blocks = [block for each in segments for block in _placed(each) if block.get("state") in HELD]
    of = _Addresses(owners)
    known, lines, unknown = Sums(), Sums(), 0
    for block in blocks:
        owner = of.at(block["address"], block["size"])
        if owner is not None:
            known.add((owner.kind, owner.module), block["size"])
            continue
        unknown += block["size"]
        lines.add(_site(block.get("frames", ())), block["size"])
    reserved = sum(each.get("total_size", 0) for each in segments)
    allocated = sum(block["size"] for block in blocks)
    traces = snapshot.get("device_traces", ())
    history = traces[device] if device < len(traces) else ()
    # A segment that a part of is in use cannot be given back, nor used for what is larger than its holes.
    idle = sum(
        each.get("total_size", 0) for each in segments if not any(b.get("state") in HELD for b in each["blocks"])
    )
    return {
        "allocated": allocated,
        "reserved": reserved,
        "in_holes": max(0, reserved - allocated - idle),
        "unknown": unknown,
        "holders": known.rows("kind", "module"),
        "lines": lines.rows("file", "line", "function"),
    } | _history(history, allocated, of)


def thin(points: Sequence[tuple[float, int]], most: int = POINTS) -> list[tuple[float, int]]:
    """Return at most about `most` of `points`, with the lowest and the highest of each stretch."""
    if len(points) <= most:
        return list(points)
    size, kept = -(-2 * len(points) // most), []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        ends = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


class _Addresses:
    """Finds whose memory an address is."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._owners = sorted(owners, key=lambda each: each.address)
        self._starts = [each.address for each in self._owners]

    def at(self, address: int, size: int) -> Owner | None:
        """Return the owner of a block, which may begin before what it holds, but not behind it."""
        index = bisect_right(self._starts, address + size - 1) - 1
        if index < 0:
            return None
        found = self._owners[index]
        return found if found.address + found.num_bytes > address else None


def _placed(segment: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the blocks of a segment with their addresses, which older versions of torch leave out."""
    address = segment.get("address", 0)
    for block in segment.get("blocks", ()):
        yield {"address": address} | dict(block)
        address += block["size"]


def _history(history: Sequence[Mapping[str, Any]], allocated: int, of: _Addresses) -> dict[str, Any]:
    """Return the timeline and who held what at its peak; nothing without a history."""
    steps = [each for each in history if each.get("action") in ("alloc", "free_completed")]
    if not steps:
        return {"timeline": [], "peak": None}
    sign = {"alloc": 1, "free_completed": -1}
    start = level = allocated - sum(sign[each["action"]] * each["size"] for each in steps)
    points, began = [(0.0, start)], steps[0].get("time_us", 0)
    peak, peak_at = start, -1
    for index, each in enumerate(steps):
        level += sign[each["action"]] * each["size"]
        points.append(((each.get("time_us", 0) - began) / 1e6, level))
        if level > peak:
            peak, peak_at = level, index
    timeline = [{"seconds": round(seconds, 6), "allocated": level} for seconds, level in thin(points)]
    return {"timeline": timeline, "peak": _at_peak(steps[: peak_at + 1], peak, of)}


def _at_peak(steps: Sequence[Mapping[str, Any]], peak: int, of: _Addresses) -> dict[str, Any]:
    """Return who held what after `steps`: what was asked for in them, by line, and what was there before them."""
    live: dict[int, Mapping[str, Any]] = {}
    for each in steps:
        if each["action"] == "alloc":
            live[each["addr"]] = each
        else:
            live.pop(each["addr"], None)
    lines = Sums()
    for each in live.values():
        lines.add(_site(each.get("frames", ())), each["size"])
    since = sum(each["size"] for each in live.values())
    return {"allocated": peak, "from_before": peak - since, "lines": lines.rows("file", "line", "function")}


def _site(frames: Sequence[Mapping[str, Any]]) -> tuple[str, int, str]:
    """Return the line that asked for memory, past torch's own corridors; of C++ alone there is nothing to tell."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and not CORRIDOR.search(file):
            return file, int(frame.get("line", 0)), str(frame.get("name", ""))
    for frame in frames:
        if str(frame.get("filename", "")).endswith(".py"):
            return str(frame["filename"]), int(frame.get("line", 0)), str(frame.get("name", ""))
    return "", 0, "unknown" if not frames else str(frames[0].get("name", ""))

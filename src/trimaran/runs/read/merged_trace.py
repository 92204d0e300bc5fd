"""Merges the traces of several ranks into one for Perfetto and chrome://tracing, with one process per rank."""

import gzip
import json
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import replace_file
from trimaran.runs.read.trace_summary import Trace, is_communication

PHASES, DEVICE_PHASES, FIRST_THREAD = 1, 2, 10  # track numbers
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
MAX_SKEW_DEVIATION_MICROSECONDS = 5000.0  # of the ends of collectives; with more, the skew is not corrected


def merge(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return one trace: process N is rank N, with its phases on their own track above its threads.

    The clock skew between hosts is corrected by the ends of collectives, which all ranks reach together. Without any,
    the hosts' own clocks are used. `clocks` has the shift of each host.
    """
    if not traces:
        raise ValueError("no trace to merge")
    origin = min(each.base_ns for each in traces)
    shifts = clock_shifts(traces)
    start = min(each.window[0] + _offset(each, origin) + shifts[each.host] for each in traces)
    events: list[dict[str, Any]] = []
    flows: dict[tuple[int, Any], int] = {}
    for trace in sorted(traces, key=lambda each: each.rank):
        events += _rank_events(trace, _offset(trace, origin) + shifts[trace.host] - start, flows)
    clocks = {host: {"shift_microseconds": round(shift, 3)} for host, shift in shifts.items()}
    return {"displayTimeUnit": "ms", "clocks": clocks, "traceEvents": events}


def write_merged(merged: Mapping[str, Any], path: Path) -> None:
    """Write a merged trace atomically."""
    with replace_file(path) as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as text:
        json.dump(merged, text, separators=(",", ":"))


def clock_shifts(traces: Sequence[Trace]) -> dict[str, float]:
    """Return by host the microseconds to add to its clock, to match the host of the lowest rank."""
    first = min(traces, key=lambda each: each.rank)
    shifts: dict[str, float] = {first.host: 0.0}
    for trace in sorted(traces, key=lambda each: each.rank):
        if trace.host not in shifts:
            shifts[trace.host] = _shift(first, trace)
    return shifts


def _shift(first: Trace, other: Trace) -> float:
    """Return how far the clock of `other` is behind `first`, by the ends of their common collectives."""
    origin = first.base_ns
    here, there = (
        {name: [end + _offset(each, origin) for end in ends] for name, ends in _collective_ends(each).items()}
        for each in (first, other)
    )
    apart = [a - b for name in here.keys() & there.keys() if len(here[name]) == len(there[name])
             for a, b in zip(here[name], there[name], strict=True)]  # fmt: skip
    if not apart:
        return 0.0
    middle = statistics.median(apart)
    is_steady = statistics.median(abs(each - middle) for each in apart) <= MAX_SKEW_DEVIATION_MICROSECONDS
    return middle if is_steady else 0.0


def _collective_ends(trace: Trace) -> dict[str, list[float]]:
    """Return by name the end times of collectives over all ranks."""
    found: dict[str, list[float]] = {}
    for each in sorted(trace.spans, key=lambda each: each["ts"]):
        size = each.get("args", {}).get("Group size", trace.world_size)
        if is_communication(each) and size == trace.world_size:
            found.setdefault(str(each["name"]), []).append(each["ts"] + each["dur"])
    return found


def _offset(trace: Trace, origin: int) -> float:
    return (trace.base_ns - origin) / 1e3


def _rank_events(trace: Trace, shift: float, flows: dict[tuple[int, Any], int]) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank as process `rank`, shifted by `shift` microseconds."""
    rank = trace.rank
    on = f" on {trace.host}" if trace.host else ""
    yield from _name(rank, None, f"rank {rank}{on}{f' ({trace.device})' if trace.device else ''}", rank)
    yield from _name(rank, PHASES, "phases of the step", PHASES)
    for begin, end, phase, step in trace.host_phases:
        yield _span(rank, PHASES, phase, begin + shift, end - begin, step)
    if trace.kernels:
        yield from _name(rank, DEVICE_PHASES, "phases on the device", DEVICE_PHASES)
        for begin, end, phase, step in device_phases(trace):
            yield _span(rank, DEVICE_PHASES, phase, begin + shift, end - begin, step)
    tracks: dict[tuple[Any, Any], int] = {}
    names = _thread_names(trace)
    for each in trace.events:
        if each.get("ph") == "M" or "ts" not in each or not isinstance(each.get("pid"), int) or each.get("tid") == "":
            continue  # the profiler's own events
        key = each.get("pid"), each.get("tid")
        if key not in tracks:
            tracks[key] = FIRST_THREAD + len(tracks)
            is_device = each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
            name = f"GPU {key[0]} stream {key[1]}" if is_device else names.get(key, f"thread {key[1]}")
            yield from _name(rank, tracks[key], name, tracks[key])
        moved = each | {"pid": rank, "tid": tracks[key], "ts": each["ts"] + shift}
        if "id" in each:
            moved["id"] = flows.setdefault((rank, each["id"]), len(flows) + 1)
        yield moved


def device_phases(trace: Trace) -> list[tuple[float, float, str, int]]:
    """Return (begin, end, phase, step) on the device: a kernel belongs to the phase in which the host launched it."""
    launched = {each["args"]["correlation"]: each["ts"] for each in trace.spans
                if each.get("cat") in LAUNCH_CATEGORIES and "correlation" in each.get("args", {})}  # fmt: skip
    starts = [each[0] for each in trace.host_phases]
    found: list[tuple[float, float, str, int]] = []
    for each in trace.kernels:
        at = launched.get(each.get("args", {}).get("correlation"))
        index = bisect_right(starts, at) - 1 if at is not None else -1
        if index < 0:
            continue
        _, _, phase, step = trace.host_phases[index]
        begin, end = float(each["ts"]), float(each["ts"]) + float(each["dur"])
        if found and found[-1][2:] == (phase, step):
            found[-1] = found[-1][0], max(end, found[-1][1]), phase, step
        else:
            found.append((max(begin, found[-1][1]) if found else begin, end, phase, step))
    return [each for each in found if each[1] > each[0]]


def _span(rank: int, track: int, phase: str, begin: float, length: float, step: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "phase", "name": phase, "pid": rank, "tid": track, "ts": begin, "dur": length,
            "args": {"step": step}}  # fmt: skip


def _name(rank: int, track: int | None, name: str, order: int) -> Iterator[dict[str, Any]]:
    kind = "process" if track is None else "thread"
    ids = {"pid": rank, "tid": track or 0}
    yield {"ph": "M", "name": f"{kind}_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **ids, "args": {"sort_index": order}}


def _thread_names(trace: Trace) -> dict[tuple[Any, Any], str]:
    return {(each.get("pid"), each.get("tid")): str(each.get("args", {}).get("name", ""))
            for each in trace.events if each.get("ph") == "M" and each.get("name") == "thread_name"}  # fmt: skip

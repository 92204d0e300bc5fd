"""Summarises a trace of PyTorch's profiler: the largest kernels or operators, idle time and exposed communication.

Traces are read as JSON, without torch. In a trace made by Trimaran, the key `trimaran` has the rank, the steps and the
host's phases.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file

Interval = tuple[float, float]
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_ROWS = 12
# Operators that only contain others, or start communication.
WRAPPER_OPERATORS = re.compile(r"^(autograd::engine|c10d::|gloo:|record_param_comms)|Backward\d*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """The self time of one kernel or operator, without the operators it called."""

    name: str
    seconds: float
    calls: int
    share: float  # of the window


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The summary of a trace. `seconds` is the window; the other times are parts of it. `rows` are the largest parts.

    If `on_device`, rows are kernels and `idle` is of the device. Otherwise rows are operators, and `idle` is the time
    without any.
    """

    rank: int
    steps: tuple[int, int]
    on_device: bool
    seconds: float
    idle: float
    communication: float
    exposed: float
    rows: tuple[TraceRow, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        names = ("rank", "steps", "on_device", "seconds", "idle", "communication", "exposed")
        rows = [{key: getattr(row, key) for key in ("name", "seconds", "calls", "share")} for row in self.rows]
        return {name: getattr(self, name) for name in names} | {"rows": rows}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's trace. Times of `events` are microseconds since `base_ns`, which is nanoseconds since the epoch."""

    events: Sequence[dict[str, Any]]
    base_ns: int
    rank: int
    world_size: int
    host: str
    device: str
    steps: tuple[int, int]
    phases: Sequence[tuple[int, str, int, int]] = field(default_factory=list)

    @cached_property
    def host_phases(self) -> list[tuple[float, float, str, int]]:
        """The host's phases as (begin, end, phase, step), in the time of `events`."""
        named = (each for each in self.phases if each[1] not in ("", "aside"))  # discarded time, in older traces
        return [((a - self.base_ns) / 1e3, (b - self.base_ns) / 1e3, phase, step) for step, phase, a, b in named]

    @cached_property
    def spans(self) -> list[dict[str, Any]]:
        return [each for each in self.events if each.get("ph") == "X" and "ts" in each and "dur" in each]

    @cached_property
    def kernels(self) -> list[dict[str, Any]]:
        """The kernels and copies on the device, in order."""
        on_device = (each for each in self.spans if each.get("cat") in DEVICE_CATEGORIES)
        return sorted(on_device, key=lambda each: each["ts"])

    @cached_property
    def window(self) -> Interval:
        """The begin and end of the traced steps."""
        if phases := self.host_phases:
            return phases[0][0], max([phases[-1][1], *(each["ts"] + each["dur"] for each in self.kernels[-1:])])
        times = [t for each in self.spans if each.get("cat") != "Trace" for t in _interval(each)] or [0.0]
        return min(times), max(times)


def load_trace(path: Path) -> Trace:
    """Return the trace in a file of PyTorch's profiler, compressed with gzip or not."""
    try:
        with open_regular_file(path, follow_links=True) as file:
            raw = gzip.decompress(file.read()) if path.suffix == ".gz" else file.read()
        tree = json.loads(raw.decode("utf-8", errors="replace"))
        metadata = tree.get("trimaran", {})
        events = [each for each in tree["traceEvents"] if isinstance(each, dict)]
        return Trace(
            events=events,
            base_ns=int(tree.get("baseTimeNanoseconds", 0)),
            rank=int(metadata.get("rank", tree.get("distributedInfo", {}).get("rank", 0))),
            world_size=int(metadata.get("world_size", 1)),
            host=str(metadata.get("host", "")),
            device=str(metadata.get("device", "")),
            steps=(int(metadata["steps"][0]), int(metadata["steps"][1])) if "steps" in metadata else (0, 0),
            phases=[(int(step), str(phase), int(a), int(b)) for step, phase, a, b in metadata.get("phases", ())],
        )
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError("D011", f"this is not a profiler trace: {why}", where=str(path),
                        fix="record a new one: trimaran profile RUN, or --profile FIRST:END") from None  # fmt: skip


def summarise(trace: Trace) -> TraceSummary:
    """Return the summary of a trace."""
    begin, end = trace.window
    length = max(end - begin, 1e-9)
    on_device = bool(trace.kernels)
    if on_device:
        kernels = trace.kernels
        totals = _totals((each["name"], float(each["dur"])) for each in kernels)
        comms = [_interval(each) for each in kernels if is_communication(each)]
        compute = union(_interval(each) for each in kernels if not is_communication(each))
    else:
        operators = self_times([each for each in trace.spans if each.get("cat") == "cpu_op"])
        totals = _totals((each["name"], seconds) for each, seconds in operators)
        comms = [_interval(each) for each in trace.spans if is_communication(each)]
        compute = union(_interval(each) for each, _ in operators if not WRAPPER_OPERATORS.search(each["name"]))
    compute = clip(compute, trace.window)
    communication = clip(union(comms), trace.window)
    hidden = total(overlap(compute, communication))
    busy = total(compute) + total(communication) - hidden if on_device else total(compute)
    rows = [TraceRow(name=name, seconds=took / 1e6, calls=calls, share=took / length)
            for name, (took, calls) in sorted(totals.items(), key=lambda each: -each[1][0])[:MAX_ROWS]]  # fmt: skip
    return TraceSummary(
        rank=trace.rank,
        steps=trace.steps,
        on_device=on_device,
        seconds=length / 1e6,
        idle=max(0.0, length - busy) / 1e6,
        communication=total(communication) / 1e6,
        exposed=(total(communication) - hidden) / 1e6,
        rows=tuple(rows),
    )


def is_communication(event: dict[str, Any]) -> bool:
    """Whether a span is communication: an NCCL kernel, or work of gloo's threads."""
    name, cat = str(event.get("name", "")), event.get("cat")
    return ("nccl" in name.lower() and cat == "kernel") or (name.startswith("gloo:") and cat == "user_annotation")


def self_times(spans: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Return each span with its self time in microseconds, without the spans nested in it on its thread."""
    found: list[list[Any]] = []
    open_by_thread: dict[Any, list[list[Any]]] = {}
    for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        entry = [each, float(each["dur"])]
        stack = open_by_thread.setdefault((each.get("pid"), each.get("tid")), [])
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= each["ts"]:
            stack.pop()
        if stack:
            stack[-1][1] -= each["dur"]
        stack.append(entry)
        found.append(entry)
    return [(each, max(0.0, seconds)) for each, seconds in found]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`, sorted and without overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
    starts, found = [each[0] for each in other], []
    for begin, end in one:
        index = max(0, bisect_right(starts, begin) - 1)
        while index < len(other) and other[index][0] < end:
            low, high = max(begin, other[index][0]), min(end, other[index][1])
            if low < high:
                found.append((low, high))
            index += 1
    return found


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    return overlap(intervals, [window])


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _totals(parts: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    totals: dict[str, tuple[float, int]] = {}
    for name, took in parts:
        before = totals.get(name, (0.0, 0))
        totals[name] = before[0] + took, before[1] + 1
    return totals

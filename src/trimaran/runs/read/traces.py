"""Reads profiles: summaries and merged timelines of torch's traces, and the statistics of Nsight Systems."""

import csv
import gzip
import json
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trimaran.core import UserError, open_regular_file, replace_file

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
        return asdict(self)


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
        raise UserError("D011.not-profiler-trace", where=str(path), why=why) from None


def summarise(trace: Trace) -> TraceSummary:
    """Return the summary of a trace."""
    begin, end = trace.window
    length = max(end - begin, 1e-9)
    on_device = bool(trace.kernels)
    if on_device:
        kernels = trace.kernels
        parts = [(each["name"], float(each["dur"])) for each in kernels]
        comms = [_interval(each) for each in kernels if is_communication(each)]
        compute = union(_interval(each) for each in kernels if not is_communication(each))
    else:
        operators = self_times([each for each in trace.spans if each.get("cat") == "cpu_op"])
        parts = [(each["name"], seconds) for each, seconds in operators]
        comms = [_interval(each) for each in trace.spans if is_communication(each)]
        compute = union(_interval(each) for each, _ in operators if not WRAPPER_OPERATORS.search(each["name"]))
    compute, communication = overlap(compute, [trace.window]), overlap(union(comms), [trace.window])
    hidden = total(overlap(compute, communication))
    busy = total(compute) + total(communication) - hidden if on_device else total(compute)
    totals, calls = defaultdict[str, float](float), Counter[str]()
    for name, took in parts:
        totals[name] += took
        calls[name] += 1
    rows = [TraceRow(name=name, seconds=took / 1e6, calls=calls[name], share=took / length)
            for name, took in sorted(totals.items(), key=lambda each: -each[1])[:MAX_ROWS]]  # fmt: skip
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


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


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
        rank, shift = trace.rank, _offset(trace, origin) + shifts[trace.host] - start
        on = f" on {trace.host}" if trace.host else ""
        events += _name(rank, None, f"rank {rank}{on}{f' ({trace.device})' if trace.device else ''}", rank)
        events += _phases(trace.host_phases, rank, PHASES, "phases of the step", shift)
        if trace.kernels:
            events += _phases(device_phases(trace), rank, DEVICE_PHASES, "phases on the device", shift)
        tracks: dict[tuple[Any, Any], int] = {}
        names = {
            (each.get("pid"), each.get("tid")): str(each.get("args", {}).get("name", ""))
            for each in trace.events
            if each.get("ph") == "M" and each.get("name") == "thread_name"
        }
        for each in trace.events:
            if each.get("ph") == "M" or "ts" not in each or type(each.get("pid")) is not int or each.get("tid") == "":
                continue  # the profiler's own events
            key = each.get("pid"), each.get("tid")
            if key not in tracks:
                tracks[key] = FIRST_THREAD + len(tracks)
                is_device = each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
                name = f"GPU {key[0]} stream {key[1]}" if is_device else names.get(key, f"thread {key[1]}")
                events += _name(rank, tracks[key], name, tracks[key])
            moved = each | {"pid": rank, "tid": tracks[key], "ts": each["ts"] + shift}
            if "id" in each:
                moved["id"] = flows.setdefault((rank, each["id"]), len(flows) + 1)
            events.append(moved)
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
        if trace.host in shifts:
            continue
        # By the ends of the collectives that both have.
        here, there = _collective_ends(first, first.base_ns), _collective_ends(trace, first.base_ns)
        apart = [a - b for name in here.keys() & there.keys() if len(here[name]) == len(there[name])
                 for a, b in zip(here[name], there[name], strict=True)]  # fmt: skip
        middle = statistics.median(apart) if apart else 0.0
        deviation = statistics.median(abs(each - middle) for each in apart) if apart else 0.0
        shifts[trace.host] = middle if deviation <= MAX_SKEW_DEVIATION_MICROSECONDS else 0.0
    return shifts


def _collective_ends(trace: Trace, origin: int) -> dict[str, list[float]]:
    """Return by name the end times of collectives over all ranks, in microseconds since `origin`."""
    found: dict[str, list[float]] = {}
    for each in sorted(trace.spans, key=lambda each: each["ts"]):
        size = each.get("args", {}).get("Group size", trace.world_size)
        if is_communication(each) and size == trace.world_size:
            found.setdefault(str(each["name"]), []).append(each["ts"] + each["dur"] + _offset(trace, origin))
    return found


def _offset(trace: Trace, origin: int) -> float:
    return (trace.base_ns - origin) / 1e3


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


def _phases(
    phases: Iterable[tuple[float, float, str, int]], rank: int, track: int, name: str, shift: float
) -> Iterator[dict[str, Any]]:
    """Yield phases as a track of `rank`, shifted by `shift` microseconds."""
    yield from _name(rank, track, name, track)
    for begin, end, phase, step in phases:
        yield {"ph": "X", "cat": "phase", "name": phase, "pid": rank, "tid": track, "ts": begin + shift,
               "dur": end - begin, "args": {"step": step}}  # fmt: skip


def _name(rank: int, track: int | None, name: str, order: int) -> Iterator[dict[str, Any]]:
    kind = "process" if track is None else "thread"
    ids = {"pid": rank, "tid": track or 0}
    yield {"ph": "M", "name": f"{kind}_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **ids, "args": {"sort_index": order}}


STEP = re.compile(r"step \d+")
RANGE_NAMES = ("data", "forward", "backward", "comm", "optimizer", "checkpoint", "evaluation")
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSeconds:
    """A range by its text: how often it was open, the seconds of all, and their share of the steps."""

    text: str
    calls: int
    seconds: float
    share: float

    @property
    def is_phase(self) -> bool:
        return self.text in RANGE_NAMES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_phase": self.is_phase}


def read_nsys_stats(text: str) -> list[RangeSeconds]:
    """Return the ranges in the CSV of the report `nvtx_pushpop_sum`, without steps, the longest first.

    Lines around the table are ignored. A range of NVTX's default domain is named `:text`.
    """
    lines = text.splitlines()
    first = next((at for at, line in enumerate(lines) if "Total Time (ns)" in line and "Range" in line), len(lines))
    rows = [
        (each["Range"].removeprefix(":"), int(each["Instances"]), float(each["Total Time (ns)"]) / NANOSECONDS)
        for each in csv.DictReader(lines[first:])
        if each.get("Range") and each.get("Instances")
    ]
    steps = sum(seconds for name, _, seconds in rows if STEP.fullmatch(name))
    found = [
        RangeSeconds(text=name, calls=calls, seconds=seconds, share=seconds / steps if steps else 0.0)
        for name, calls, seconds in rows
        if not STEP.fullmatch(name)
    ]
    return sorted(found, key=lambda each: -each.seconds)

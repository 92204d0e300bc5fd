"""What a trace of PyTorch's profiler says: what took the time, what stood idle, which communication nothing hides.

Traces are read as JSON, without torch. A trace that Trimaran made says under `trimaran` whose it is, of which steps,
and when the host was in which phase of them.
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

Interval = tuple[float, float]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 12
# Operators that others run in, or that hand something to communication: they are no work themselves.
WRAPPER = re.compile(r"^(autograd::engine|c10d::|gloo:|record_param_comms)|Backward\d*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What one kernel or operator took of a trace, itself, without what it called."""

    name: str
    seconds: float
    calls: int
    share: float  # of the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A trace in a few numbers. `seconds` is the window; the others are seconds of it, and `rows` its largest parts.

    `on_device`: the rows are kernels, and idle is the device. Else they are operators, and idle is when none ran.
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
    """One rank's trace. Times of `events` are microseconds since `base_ns`, nanoseconds since the epoch."""

    events: Sequence[dict[str, Any]]
    base_ns: int
    rank: int
    world_size: int
    host: str
    device: str
    steps: tuple[int, int]
    phases: Sequence[tuple[int, str, int, int]] = field(default_factory=list)

    @cached_property
    def laps(self) -> list[tuple[float, float, str, int]]:
        """The host's phases as (from, until, phase, step), in the time of `events`."""
        shown = (each for each in self.phases if each[1] and each[1] != "aside")
        return [((a - self.base_ns) / 1e3, (b - self.base_ns) / 1e3, phase, step) for step, phase, a, b in shown]

    @cached_property
    def spans(self) -> list[dict[str, Any]]:
        return [each for each in self.events if each.get("ph") == "X" and "ts" in each and "dur" in each]

    @cached_property
    def kernels(self) -> list[dict[str, Any]]:
        """What ran on the device, in order."""
        return sorted((each for each in self.spans if each.get("cat") in DEVICE), key=lambda each: each["ts"])

    @cached_property
    def window(self) -> Interval:
        """From when until when the steps took."""
        if self.laps:
            return self.laps[0][0], max([self.laps[-1][1], *(each["ts"] + each["dur"] for each in self.kernels[-1:])])
        times = [t for each in self.spans if each.get("cat") != "Trace" for t in _ends(each)] or [0.0]
        return min(times), max(times)


def load_trace(path: Path) -> Trace:
    """Return the trace in a file that PyTorch's profiler wrote; gzip or not."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", errors="replace") as file
        ):
            tree = json.load(file)
        about = tree.get("trimaran", {})
        events = [each for each in tree["traceEvents"] if isinstance(each, dict)]
        return Trace(
            events=events,
            base_ns=int(tree.get("baseTimeNanoseconds", 0)),
            rank=int(about.get("rank", tree.get("distributedInfo", {}).get("rank", 0))),
            world_size=int(about.get("world_size", 1)),
            host=str(about.get("host", "")),
            device=str(about.get("device", "")),
            steps=(int(about["steps"][0]), int(about["steps"][1])) if "steps" in about else (0, 0),
            phases=[(int(step), str(phase), int(a), int(b)) for step, phase, a, b in about.get("phases", ())],
        )
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError("D011", f"this is not a trace: {error}", where=str(path),
                        fix="make another one: trimaran profile RUN, or --profile FIRST:END") from None  # fmt: skip


def summarise(trace: Trace) -> Summary:
    """Return what took the time of a trace."""
    begin, end = trace.window
    length = max(end - begin, 1e-9)
    on_device = bool(trace.kernels)
    if on_device:
        work = trace.kernels
        sums = _sums((each["name"], float(each["dur"])) for each in work)
        comms = [_ends(each) for each in work if is_communication(each)]
        computing = unite(_ends(each) for each in work if not is_communication(each))
    else:
        owns = own_times([each for each in trace.spans if each.get("cat") == "cpu_op"])
        sums = _sums((each["name"], own) for each, own in owns)
        comms = [_ends(each) for each in trace.spans if is_communication(each)]
        computing = unite(_ends(each) for each, _ in owns if not WRAPPER.search(each["name"]))
    computing = clip(computing, trace.window)
    talking = clip(unite(comms), trace.window)
    hidden = total(overlap(computing, talking))
    busy = total(computing) + total(talking) - hidden if on_device else total(computing)
    rows = [TraceRow(name=name, seconds=took / 1e6, calls=calls, share=took / length)
            for name, (took, calls) in sorted(sums.items(), key=lambda each: -each[1][0])[:TOP]]  # fmt: skip
    return Summary(
        rank=trace.rank,
        steps=trace.steps,
        on_device=on_device,
        seconds=length / 1e6,
        idle=max(0.0, length - busy) / 1e6,
        communication=total(talking) / 1e6,
        exposed=(total(talking) - hidden) / 1e6,
        rows=tuple(rows),
    )


def is_communication(event: dict[str, Any]) -> bool:
    """Whether a span is bytes on their way to other ranks: a kernel of NCCL, or what gloo's threads do."""
    name, cat = str(event.get("name", "")), event.get("cat")
    return ("nccl" in name.lower() and cat == "kernel") or (name.startswith("gloo:") and cat == "user_annotation")


def own_times(spans: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Return each span with the microseconds that it took itself, without the spans inside of it on its thread."""
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
    return [(each, max(0.0, own)) for each, own in found]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`, in order and without overlap."""
    united: list[Interval] = []
    for begin, end in sorted(intervals):
        if united and begin <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((begin, end))
    return united


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what two unions have in common."""
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


def _ends(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _sums(parts: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for name, took in parts:
        before = sums.get(name, (0.0, 0))
        sums[name] = before[0] + took, before[1] + 1
    return sums

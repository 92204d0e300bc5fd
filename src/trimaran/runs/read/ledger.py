"""The goodput ledger: splits the wall-clock time of a run since its launch into categories, from the run's files.

`attempts.jsonl` has the start and end of each attempt. The events of rank 0 say when the ranks were ready, and what was
saved, evaluated or replayed. `metrics.jsonl` splits the time of each step. The rest of an attempt is start-up and
shut-down, or a restart if the attempt failed.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from trimaran.runs.read.run_reader import RunReader
from trimaran.runs.read.step_index import (
    MAX_UNINDEXED_BYTES,
    READ_LIMITS,
    STEP_CATEGORIES,
    ReadLimits,
    StepBlock,
    StepReader,
    split_step,
)
from trimaran.runs.read.step_lines import StepLine
from trimaran.runs.run_directory import RunDirectory

Line = Mapping[str, Any]

# Productive time comes first. `idle` is the time between a stop and a resume, when no process ran.
CATEGORIES = (*STEP_CATEGORIES, "evaluation", "compile", "init", "restart", "replay", "idle")
# After the last step, the category of the time before an event.
CATEGORY_BEFORE_EVENT = {
    "checkpoint": "save",
    "upload": "save",
    "saved": "save",
    "evaluation": "evaluation",
    "sample": "evaluation",
    "rewind": "restart",
}
RECENT_STEPS = 64  # the latest of an attempt, whose median is a typical step
HANG_FACTOR = 5.0  # a step that takes this many typical steps hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Seconds of a run by category, from its launch to `until`. They add up to `total`."""

    since: float
    until: float
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return self.until - self.since

    @property
    def at_work(self) -> float:
        """The total without idle time."""
        return self.total - self.seconds["idle"]

    @property
    def goodput(self) -> float:
        """The fraction of `at_work` in compute and communication of steps that were not replayed, for every view."""
        return (self.seconds["compute"] + self.seconds["communication"]) / self.at_work if self.at_work > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("since", "until", "total", "at_work", "goodput", "seconds")}


@dataclass(slots=True, kw_only=True)
class AttemptTimes:
    """The times of one attempt, from `begin` to `end`; None while the end is not written."""

    begin: float
    end: float | None = None
    how: str = ""
    reached: int = 0  # the last step that all ranks finished
    over: float | None = None  # when its supervisor exited
    start: int | None = None  # the step that it resumed from, once it was ready
    ready: float = 0.0
    compile: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(STEP_CATEGORIES))  # without replayed steps
    # (time, category of the time before it, or "") of each event.
    events: list[tuple[float, str]] = field(default_factory=list)
    # Of the written steps: the highest, the time of the last, and the seconds of the latest ones.
    highest: int = 0
    last: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    # Steps that a later attempt replayed.
    replayed: int = 0
    replayed_seconds: float = 0.0

    @property
    def usual(self) -> float:
        """The seconds of a typical step."""
        if self.recent:
            return median(self.recent)
        return self.replayed_seconds / self.replayed if self.replayed else 0.0


class LedgerReader:
    """Reads the files of a run incrementally.

    `read` returns the ledger. A caller that needs the steps as well calls `poll`, then `new_steps`, then `compute`, so
    that each line is read once. The last `num_lines` steps are then single ones, also of a long run. `steps` knows
    which lines were not read.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        num_lines: int = RECENT_STEPS,
        max_unindexed_bytes: int = MAX_UNINDEXED_BYTES,
        limits: ReadLimits = READ_LIMITS,
    ) -> None:
        self._run, self._num_lines = run, max(num_lines, RECENT_STEPS)
        self._max_unindexed_bytes, self._limits = max_unindexed_bytes, limits
        self._open()

    def _open(self) -> None:
        self._attempts: list[AttemptTimes] = []
        self._supervised = False
        self._reader = RunReader(self._run)
        self.steps = StepReader(
            self._run, self._num_lines, max_unindexed_bytes=self._max_unindexed_bytes, limits=self._limits
        )

    def reopen(self) -> None:
        """Begin anew: `new_steps` starts from the first step, and finds an index that was written meanwhile."""
        self._open()
        self._poll()

    def read(self, *, now: float | None = None) -> Ledger:
        """Read new lines and return the ledger, see `compute`."""
        self.poll()
        deque(self.new_steps(), maxlen=0)
        return self.compute(now=now)

    def poll(self) -> bool:
        """Read new attempts and events. If True, metrics lines were truncated and `new_steps` starts from the first.

        Truncated lines may have been counted already, and the file may have grown again, so all is read anew.
        """
        has_attempts = bool(self._attempts)
        if self._poll() and has_attempts:
            self.reopen()
            return True
        return False

    def _poll(self) -> bool:
        """Read new attempts and events; return whether metrics lines were truncated."""
        for line in self._reader.records(self._run.attempts):
            self._supervised = True
            if not isinstance(line.get("ended", line.get("time")), int | float):
                continue  # a damaged line
            if "world_size" in line:
                self._attempts.append(AttemptTimes(begin=line["time"]))
            elif "ended" in line and self._attempts:
                last = self._attempts[-1]
                last.end, last.how, last.reached = line["ended"], line.get("how", ""), int(_number(line, "step"))
            elif "over" in line and self._attempts:
                self._attempts[-1].over = line["time"]
        truncated = [self._read_event(line) for line in self._reader.events() if _is_event(line)]
        return any(truncated)

    def new_steps(self) -> Iterator[StepLine | StepBlock]:
        """Count the new steps, and yield them; of a long past, blocks of steps that one attempt did."""
        attempt: AttemptTimes | None = None
        first = after = 0  # `attempt` did the steps from `first` on and before `after`
        # A block counts if one attempt did all its steps, which are not among its latest, whose times are kept.
        for step in self.steps.new(lambda block: block.last + RECENT_STEPS < self._attempt_of_step(block.first)[2]):
            number = step.first if isinstance(step, StepBlock) else step.step
            if not first <= number < after:
                attempt, first, after = self._attempt_of_step(number)
            if attempt is not None:
                _add_step(attempt, step)
            yield step

    def compute(self, *, now: float | None = None) -> Ledger:
        """Return the ledger of what was read, up to `now` for a live run; without `now`, up to the last line."""
        attempts = self._attempts
        if not attempts:
            return Ledger(since=0.0, until=0.0, seconds=dict.fromkeys(CATEGORIES, 0.0))
        following = [*attempts[1:], None]
        ends = [_end(each, after, now) for each, after in zip(attempts, following, strict=True)]
        until = max(ends[-1], attempts[-1].over or ends[-1])
        if now is not None and attempts[-1].over is None:
            until = max(until, now)  # its ranks have ended, and the supervisor is about to restart them
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
            before = attempts[number - 1] if number else None
            is_restart = before is not None and before.over is None
            for name, part in _attempt_seconds(attempt, end, lead="restart" if is_restart else "init").items():
                seconds[name] += part
            next_begin = attempts[number + 1].begin if number + 1 < len(attempts) else until
            seconds["restart" if attempt.over is None else "idle"] += max(0.0, next_begin - end)
        return Ledger(since=attempts[0].begin, until=until, seconds=seconds)

    def _read_event(self, line: Line) -> bool:
        """Read an event of rank 0; return whether it says that metrics lines were truncated."""
        kind, number, data = line["kind"], line.get("attempt", 0), line.get("data", {})
        if not self._supervised:  # another launcher started the ranks and writes no attempts.jsonl
            if kind == "start":
                self._attempts.append(AttemptTimes(begin=line["time"]))
            number = len(self._attempts) - 1
        if not 0 <= number < len(self._attempts):
            return kind == "replay"
        attempt = self._attempts[number]
        if not self._supervised and kind in ("done", "stop"):
            attempt.end = attempt.over = line["time"]
        if kind == "ready":
            attempt.start, attempt.ready = line["step"], line["time"]
        elif kind == "started":
            attempt.compile += _number(data.get("compile"), "seconds")
        elif kind == "replay":
            number, seconds = int(_number(data, "steps")), _number(data, "seconds")
            top = (
                line["step"] + number
            )  # the steps up to it, to which no later attempt resumed, are still to be counted
            for owner in reversed(self._attempts):
                if owner.start is not None and (bottom := max(owner.start, line["step"])) < top:
                    owner.replayed += top - bottom
                    owner.replayed_seconds += (top - bottom) / number * seconds
                    owner.highest, top = max(owner.highest, top), bottom
            if attempt.start is not None:  # it rewound while training, and replays steps of earlier attempts
                attempt.start = min(attempt.start, line["step"])
        attempt.events.append((line["time"], CATEGORY_BEFORE_EVENT.get(kind, "")))
        return kind == "replay"

    def _attempt_of_step(self, step: int) -> tuple[AttemptTimes | None, int, int]:
        """Return the latest attempt that resumed before `step`, and the range [first, after) of its steps."""
        after = sys.maxsize
        for attempt in reversed(self._attempts):
            if attempt.start is not None and attempt.start < step:
                return attempt, attempt.start + 1, after
            if attempt.start is not None:
                after = min(after, attempt.start + 1)
        return None, 0, after


def read_ledger(run: RunDirectory, *, now: float | None = None) -> Ledger:
    """Return the ledger of `run`, see `LedgerReader.compute`."""
    return LedgerReader(run).read(now=now)


def _add_step(attempt: AttemptTimes, step: StepLine | StepBlock) -> None:
    """Add the seconds of a step, or of a block, to its attempt. A step with NaN or Inf times is skipped."""
    if isinstance(step, StepBlock):
        attempt.seconds = [before + added for before, added in zip(attempt.seconds, step.seconds, strict=True)]
        attempt.highest, attempt.last = max(attempt.highest, step.highest), max(attempt.last, step.time)
        return
    compute, communication, data, straggler, save = split_step(step)
    total = compute + communication + data + straggler + save
    if not math.isfinite(total):
        return
    seconds = attempt.seconds
    seconds[0] += compute
    seconds[1] += communication
    seconds[2] += data
    seconds[3] += straggler
    seconds[4] += save
    attempt.highest, attempt.last = max(attempt.highest, step.step), max(attempt.last, step.time)
    attempt.recent.append(total)


def _is_event(line: Line) -> bool:
    """Whether a line has the fields of an event; a file may be damaged."""
    shapes = {"kind": str, "time": int | float, "step": int, "attempt": int, "data": dict}
    optional = {"attempt": 0, "data": {}}
    return all(isinstance(line.get(name, optional.get(name)), shape) for name, shape in shapes.items())


def _number(tree: Any, name: str) -> float:
    found = tree.get(name) if isinstance(tree, dict) else None
    return found if isinstance(found, int | float) else 0.0


def _end(attempt: AttemptTimes, following: AttemptTimes | None, now: float | None) -> float:
    """Return when an attempt ended, or the last time at which it was known to run."""
    if attempt.end is not None:
        return max(attempt.begin, attempt.end)
    if following is None and attempt.over is None and now is not None:
        return max(attempt.begin, now)
    last = max([attempt.begin, attempt.ready, attempt.last, *(time for time, _ in attempt.events[-1:])])
    return min(last, following.begin) if following is not None else last


def _attempt_seconds(attempt: AttemptTimes, end: float, *, lead: str) -> dict[str, float]:
    """Return the seconds of an attempt by category; they add up to it. `lead` is the category of its start-up."""
    span = end - attempt.begin
    if attempt.start is None:
        return {lead: span}
    found = dict.fromkeys(CATEGORIES, 0.0)
    found[lead] = min(span, max(0.0, attempt.ready - attempt.begin))
    steps = dict(zip(STEP_CATEGORIES, attempt.seconds, strict=True))
    steps["compile"] = min(attempt.compile, steps["compute"])
    steps["compute"] -= steps["compile"]
    # Steps that were finished, but lost before rank 0 wrote them.
    lost = attempt.reached - max(attempt.highest, attempt.start) if attempt.how == "trouble" else 0
    steps["replay"] = attempt.replayed_seconds + attempt.usual * max(0, lost)
    available = span - found[lead]
    shrink = min(1.0, available / total) if (total := sum(steps.values())) > 0 else 1.0  # clocks differ slightly
    for name, seconds in steps.items():
        found[name] += shrink * seconds
    rest = max(0.0, available - shrink * total)
    for name, seconds in _rest_seconds(attempt, end, rest, lead).items():
        found[name] += seconds
    return found


def _rest_seconds(attempt: AttemptTimes, end: float, rest: float, lead: str) -> dict[str, float]:
    """Return the seconds outside of steps by category.

    After the last step, events give the category; the rest is evaluation or restart if one happened, else `lead`.
    """
    last = max(attempt.last, attempt.ready)
    tail = [(at, name) for at, name in attempt.events if last < at <= end]
    found: dict[str, float] = {}
    for (before, _), (at, name) in pairwise([(last, ""), *tail]):
        found[name or "init"] = found.get(name or "init", 0.0) + max(0.0, at - before)
    open_end = max(0.0, end - (tail[-1][0] if tail else last))
    if attempt.end is None:
        name = "compute" if open_end <= HANG_FACTOR * attempt.usual else "restart"
    else:
        name = "restart" if attempt.how == "trouble" else "init"
    found[name] = found.get(name, 0.0) + open_end
    after_last = sum(found.values())
    shrink = min(1.0, rest / after_last) if after_last > 0 else 1.0
    between = {name for time, name in attempt.events if attempt.ready < time <= last}
    name = next((name for name in ("evaluation", "restart") if name in between), lead)
    found = {each: shrink * seconds for each, seconds in found.items()}
    found[name] = found.get(name, 0.0) + max(0.0, rest - shrink * after_last)
    return found


MIN_POLL_SECONDS = 10.0
MAX_CPU_FRACTION = 0.01  # of one core that polling may use


class LedgerPoller:
    """Polls the ledger now and then. Each poll reads only new lines."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._reader = run, LedgerReader(run)
        self._next = 0.0

    def poll(self) -> Ledger | None:
        """Return the ledger up to now; None if the last poll was too recent."""
        began = time.monotonic()
        if began < self._next:
            return None
        ledger = self.read()
        self._next = began + max(MIN_POLL_SECONDS, (time.monotonic() - began) / MAX_CPU_FRACTION)
        return ledger

    def read(self) -> Ledger | None:
        """Return the ledger up to now, or to the end of a finished run; None if there is nothing yet."""
        try:
            # The sidecar lives as long as the supervisor, so the run is live unless its files say otherwise.
            ledger = self._reader.read(now=time.time())
        except (OSError, LookupError, ValueError):  # the run is just starting, or a file is damaged
            self._reader = LedgerReader(self._run)  # lines may have been half counted
            return None
        return ledger if ledger.total > 0 else None


def time_scalars(ledger: Ledger | None) -> dict[str, float]:
    """Return the ledger as named scalars for charts; empty for None."""
    if ledger is None:
        return {}
    return {"goodput": ledger.goodput} | {f"time_seconds/{name}": each for name, each in ledger.seconds.items()}

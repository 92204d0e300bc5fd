"""The goodput ledger: where every second of a run went since its launch, from the files that it leaves behind.

The supervisor's `attempts.jsonl` says from when to when there were ranks; the events of rank 0 say when they were
ready, and what was saved, evaluated or done again; the lines of `metrics.jsonl` say what the steps spent their time on.
What these leave open inside an attempt is start-up and shut-down, or, where it ended in trouble, a restart.
"""

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from trimaran.run.journal import Follower, LineFollower
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.step_lines import StepLine, read_step, read_waits

Line = Mapping[str, Any]

# What moves a run on comes first; `idle` is the time between a stop and a resume, when nobody ran the run.
CATEGORIES = (
    "compute",
    "communication",
    "data",
    "straggler",
    "save",
    "evaluation",
    "compile",
    "init",
    "restart",
    "replay",
    "idle",
)
IN_STEPS = CATEGORIES[:5]  # what the time inside of a step is split into
# What an event says of the time before it, after the last step.
ENDS = {"checkpoint": "save", "saved": "save", "evaluation": "evaluation", "sample": "evaluation", "rewind": "restart"}
STEPS_KNOWN = 64  # the latest of an attempt, for what a usual step takes
PATIENCE = 5.0  # a step that takes this many times the usual one stands still


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Seconds of a run by what they were spent on, from its launch to `until`. They add up to `total`."""

    since: float
    until: float
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return self.until - self.since

    @property
    def at_work(self) -> float:
        """All but the time in which nobody ran the run."""
        return self.total - self.seconds["idle"]

    @property
    def goodput(self) -> float:
        """The share of that which moved the run on: steps that count, without what they waited for or saved.

        There is no other goodput of a run: every view and every sink shows this one.
        """
        return (self.seconds["compute"] + self.seconds["communication"]) / self.at_work if self.at_work > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "until": self.until,
            "total": self.total,
            "at_work": self.at_work,
            "goodput": self.goodput,
            "seconds": self.seconds,
        }


@dataclass(slots=True, kw_only=True)
class Stay:
    """What is known of one attempt: from `begin` to `end`, None while that is not written down."""

    begin: float
    end: float | None = None
    how: str = ""
    reached: int = 0  # steps that all ranks had finished at its end
    over: float | None = None  # when its supervisor left for good
    start: int | None = None  # the step that it went on from, once it was ready
    ready: float = 0.0
    compile: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(IN_STEPS))  # of its steps that count
    events: list[tuple[float, str]] = field(default_factory=list)  # those that say what the time before them was for
    steps: "Steps" = field(default_factory=lambda: Steps())


@dataclass(slots=True)
class Steps:
    """The steps of an attempt that were written down: the highest, when that was, and what the latest ones took.

    `replayed` of them, which took `replayed_seconds`, were taken back.
    """

    highest: int = 0
    last: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KNOWN))
    replayed: int = 0
    replayed_seconds: float = 0.0

    @property
    def usual(self) -> float:
        if self.recent:
            return median(self.recent)
        return self.replayed_seconds / self.replayed if self.replayed else 0.0


class Books:
    """Reads the files of a run, and on the next look only what is new.

    Who needs the steps as well takes them from here, so that each line is read once: `look`, then `steps`, then
    `balance`. For who does not, `ledger` is all three.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._open()

    def _open(self) -> None:
        self._stays: list[Stay] = []
        self._supervised = False
        self._attempts, self._metrics = Follower(self._run.attempts), LineFollower(self._run.metrics)
        self._events = Follower(self._run.events(0))

    def ledger(self, *, now: float | None = None) -> Ledger:
        """Read what is new, and return where the time went, see `balance`."""
        self.look()
        deque(self.steps(), maxlen=0)
        return self.balance(now=now)

    def look(self) -> bool:
        """Take in what is new of starts and events. True: lines were taken back, and `steps` yields all from the first.

        Nothing else is right then: the lines may have been counted, and the file may have grown again.
        """
        known = bool(self._stays)
        if self._look() and known:
            self._open()
            self._look()
            return True
        return False

    def _look(self) -> bool:
        """Take in what is new of starts and events, and return whether lines were taken back."""
        for line in self._attempts.new():
            self._read_attempt(line)
        taken_back = [self._read_event(line) for line in self._events.new() if _is_event(line)]
        return any(taken_back)

    def steps(self) -> Iterator[StepLine]:
        """Enter the steps that are new, and yield them."""
        stay: Stay | None = None
        first = after = 0  # the steps that `stay` did: from `first` on, and before `after`
        for step in filter(None, map(read_step, self._metrics.new())):
            if not first <= step.step < after:
                stay, first, after = self._of_step(step.step)
            if stay is not None:
                _enter(stay, step)
            yield step

    def balance(self, *, now: float | None = None) -> Ledger:
        """Return where the time went, by what was read so far.

        `now` is for a run at work; without it, up to the last thing written down.
        """
        stays = self._stays
        if not stays:
            return Ledger(since=0.0, until=0.0, seconds=dict.fromkeys(CATEGORIES, 0.0))
        ends = [_end(stay, following, now) for stay, following in zip(stays, [*stays[1:], None], strict=True)]
        until = max(ends[-1], stays[-1].over or ends[-1])
        if now is not None and stays[-1].over is None:
            until = max(until, now)  # its ranks are gone, and others are about to be started
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for number, (stay, end) in enumerate(zip(stays, ends, strict=True)):
            before = stays[number - 1] if number else None
            again = before is not None and before.over is None
            for name, part in _of_stay(stay, end, lead="restart" if again else "init").items():
                seconds[name] += part
            following = stays[number + 1].begin if number + 1 < len(stays) else until
            seconds["restart" if stay.over is None else "idle"] += max(0.0, following - end)
        return Ledger(since=stays[0].begin, until=until, seconds=seconds)

    def _read_attempt(self, line: Line) -> None:
        self._supervised = True
        if not isinstance(line.get("ended", line.get("time")), int | float):
            return  # files are not to be trusted
        if "world_size" in line:
            self._stays.append(Stay(begin=line["time"]))
        elif "ended" in line and self._stays:
            last = self._stays[-1]
            last.end, last.how, last.reached = line["ended"], line.get("how", ""), int(_number(line, "step"))
        elif "over" in line and self._stays:
            self._stays[-1].over = line["time"]

    def _read_event(self, line: Line) -> bool:
        """Take in an event of rank 0; return whether it says that lines were taken back."""
        kind, number, data = line["kind"], line.get("attempt", 0), line.get("data", {})
        if not self._supervised:  # the ranks were started by somebody else, who counts nothing
            if kind == "start":
                self._stays.append(Stay(begin=line["time"]))
            number = len(self._stays) - 1
        if not 0 <= number < len(self._stays):
            return kind == "replay"
        stay = self._stays[number]
        if not self._supervised and kind in ("done", "stop"):
            stay.end = stay.over = line["time"]
        if kind == "ready":
            stay.start, stay.ready = line["step"], line["time"]
        elif kind == "started":
            stay.compile += _number(data.get("compile"), "seconds")
        elif kind == "replay":
            number, seconds = int(_number(data, "steps")), _number(data, "seconds")
            for each, steps, highest in self._owners(line["step"], number):
                each.steps.replayed += steps
                each.steps.replayed_seconds += steps / number * seconds
                each.steps.highest = max(each.steps.highest, highest)
            if stay.start is not None:  # it went back while at work, and does from now on what others had done
                stay.start = min(stay.start, line["step"])
        stay.events.append((line["time"], ENDS.get(kind, "")))
        return kind == "replay"

    def _of_step(self, step: int) -> tuple[Stay | None, int, int]:
        """Return the attempt that did `step` last, which is the latest one that went on from before it; and from which
        step on, and before which, that is true."""
        after = sys.maxsize
        for stay in reversed(self._stays):
            if stay.start is not None and stay.start < step:
                return stay, stay.start + 1, after
            if stay.start is not None:
                after = min(after, stay.start + 1)
        return None, 0, after

    def _owners(self, after: int, steps: int) -> list[tuple[Stay, int, int]]:
        """Return which attempts did the `steps` after step `after`: how many of them each did, and up to which."""
        found, top = [], after + steps
        for stay in reversed(self._stays):
            if stay.start is not None and max(stay.start, after) < top:
                found.append((stay, top - max(stay.start, after), top))
                top = max(stay.start, after)
        return found


def ledger_of(run: RunDirectory, *, now: float | None = None) -> Ledger:
    """Return where the time of `run` went, see `Books.ledger`."""
    return Books(run).ledger(now=now)


def split(step: StepLine) -> tuple[float, float, float, float, float]:
    """Return what the seconds of a step were spent on, in the order of `IN_STEPS`; they add up to `step_seconds`."""
    phases, total = step.phases, step.step_seconds
    if not total > 0:
        total = sum(phases.values())
    data, save = phases.get("data", 0.0), phases.get("checkpoint", 0.0)
    left = max(0.0, total - data - save)
    comm, straggler = read_waits(step.rest)
    straggler = min(left, straggler)
    # Who waits for others waits in a collective, whichever phase that is in.
    communication = min(left, max(phases.get("comm", 0.0), comm + straggler)) - straggler
    return left - straggler - communication, communication, data, straggler, save


def _enter(stay: Stay, step: StepLine) -> None:
    """Add a step to what its attempt did. One that nobody can have measured is passed over."""
    compute, communication, data, straggler, save = split(step)
    total = compute + communication + data + straggler + save
    if not math.isfinite(total):
        return
    seconds, steps = stay.seconds, stay.steps
    seconds[0] += compute
    seconds[1] += communication
    seconds[2] += data
    seconds[3] += straggler
    seconds[4] += save
    steps.highest, steps.last = max(steps.highest, step.step), max(steps.last, step.time)
    steps.recent.append(total)


def _is_event(line: Line) -> bool:
    """Whether a line is an event as ranks write them: files are not to be trusted."""
    shapes = {"kind": str, "time": int | float, "step": int, "attempt": int, "data": dict}
    optional = {"attempt": 0, "data": {}}
    return all(isinstance(line.get(name, optional.get(name)), shape) for name, shape in shapes.items())


def _number(tree: Any, name: str) -> float:
    """Return a number of `tree`; 0 where there is none."""
    found = tree.get(name) if isinstance(tree, dict) else None
    return found if isinstance(found, int | float) else 0.0


def _end(stay: Stay, following: Stay | None, now: float | None) -> float:
    """Return when an attempt ended, or until when it is known to have been at work."""
    if stay.end is not None:
        return max(stay.begin, stay.end)
    if following is None and stay.over is None and now is not None:
        return max(stay.begin, now)
    last = max([stay.begin, stay.ready, stay.steps.last, *(time for time, _ in stay.events[-1:])])
    return min(last, following.begin) if following is not None else last


def _of_stay(stay: Stay, end: float, *, lead: str) -> dict[str, float]:
    """Return what the time of an attempt was spent on; it adds up to it. `lead` is what its start is called."""
    span = end - stay.begin
    if stay.start is None:
        return {lead: span}
    found = dict.fromkeys(CATEGORIES, 0.0)
    found[lead] = min(span, max(0.0, stay.ready - stay.begin))
    steps = dict(zip(IN_STEPS, stay.seconds, strict=True))
    steps["compile"] = min(stay.compile, steps["compute"])
    steps["compute"] -= steps["compile"]
    steps["replay"] = stay.steps.replayed_seconds + stay.steps.usual * _unwritten(stay)
    room = span - found[lead]
    shrink = min(1.0, room / total) if (total := sum(steps.values())) > 0 else 1.0  # clocks may differ a little
    for name, seconds in steps.items():
        found[name] += shrink * seconds
    rest = max(0.0, room - shrink * total)
    for name, seconds in _of_rest(stay, end, rest, lead).items():
        found[name] += seconds
    return found


def _unwritten(stay: Stay) -> int:
    """Return how many steps were finished and lost before rank 0 could write them down."""
    known = max(stay.steps.highest, stay.start or 0)
    return max(0, stay.reached - known) if stay.how == "trouble" else 0


def _of_rest(stay: Stay, end: float, rest: float, lead: str) -> dict[str, float]:
    """Return what the time outside of steps was for. After the last step events tell; before, what stood between."""
    last = max(stay.steps.last, stay.ready)
    tail = [(time, name) for time, name in stay.events if last < time <= end]
    found: dict[str, float] = {}
    for (before, _), (time, name) in pairwise([(last, ""), *tail]):
        found[name or "init"] = found.get(name or "init", 0.0) + time - before
    open_end = max(0.0, end - (tail[-1][0] if tail else last))
    name = _name_of_end(stay, open_end)
    found[name] = found.get(name, 0.0) + open_end
    behind = sum(found.values())
    shrink = min(1.0, rest / behind) if behind > 0 else 1.0
    between = {name for time, name in stay.events if stay.ready < time <= last}
    name = next((name for name in ("evaluation", "restart") if name in between), lead)
    found = {each: shrink * seconds for each, seconds in found.items()}
    found[name] = found.get(name, 0.0) + max(0.0, rest - shrink * behind)
    return found


def _name_of_end(stay: Stay, seconds: float) -> str:
    """Return what the time from the last sign of life to the end of an attempt was for."""
    if stay.end is None:
        return "compute" if seconds <= PATIENCE * stay.steps.usual else "restart"
    return "restart" if stay.how == "trouble" else "init"

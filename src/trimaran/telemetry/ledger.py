"""The goodput ledger: where every second of a run went since its launch, from the files that it leaves behind.

The supervisor's `attempts.jsonl` says from when to when there were ranks; the events of rank 0 say when they were
ready, and what was saved, evaluated or done again; the lines of `metrics.jsonl` say what the steps spent their time on.
What these leave open inside an attempt is start-up and shut-down, or, where it ended in trouble, a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from trimaran.telemetry.journal import Follower
from trimaran.telemetry.run_directory import RunDirectory

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
    def goodput(self) -> float:
        """The share of the time that moved the run on: steps that count, without what they waited for or saved."""
        at_work = self.total - self.seconds["idle"]
        return (self.seconds["compute"] + self.seconds["communication"]) / at_work if at_work > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "until": self.until,
            "total": self.total,
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
    seconds: dict[str, float] = field(default_factory=dict)  # of its steps that count
    events: list[tuple[float, str]] = field(default_factory=list)  # those that say what the time before them was for
    steps: "Steps" = field(default_factory=lambda: Steps())


@dataclass(slots=True)
class Steps:
    """The steps of an attempt that were written down: the highest, when that was, and what the latest ones took.

    `replayed` of them, which took `replayed_seconds`, were taken back.
    """

    highest: int = 0
    last: float = 0.0
    recent: list[float] = field(default_factory=list)
    replayed: int = 0
    replayed_seconds: float = 0.0

    def add(self, line: Line) -> None:
        self.highest = max(self.highest, line.get("step", 0))
        self.last = max(self.last, line.get("time", 0.0))
        self.recent.append(line.get("step_seconds") or 0.0)
        del self.recent[:-STEPS_KNOWN]

    @property
    def usual(self) -> float:
        if self.recent:
            return median(self.recent)
        return self.replayed_seconds / self.replayed if self.replayed else 0.0


class Books:
    """Reads the files of a run, and on the next look only what is new."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._open()

    def _open(self) -> None:
        self._stays: list[Stay] = []
        self._supervised = False
        self._attempts, self._metrics = Follower(self._run.attempts), Follower(self._run.metrics)
        self._events = Follower(self._run.events(0))

    def ledger(self, *, now: float | None = None) -> Ledger:
        """Return where the time went. `now` is for a run at work; without it, up to the last thing written down."""
        if self._read():
            self._open()  # lines were taken back that may have been counted
            self._read()
        stays = self._stays
        if not stays:
            return Ledger(since=0.0, until=0.0, seconds=dict.fromkeys(CATEGORIES, 0.0))
        ends = [_end(stay, following, now) for stay, following in zip(stays, [*stays[1:], None], strict=True)]
        until = max([*ends[-1:], *([stays[-1].over] if stays[-1].over else [])])
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for number, (stay, end) in enumerate(zip(stays, ends, strict=True)):
            before = stays[number - 1] if number else None
            again = before is not None and before.over is None
            for name, part in _of_stay(stay, end, lead="restart" if again else "init").items():
                seconds[name] += part
            following = stays[number + 1].begin if number + 1 < len(stays) else until
            seconds["restart" if stay.over is None else "idle"] += max(0.0, following - end)
        return Ledger(since=stays[0].begin, until=until, seconds=seconds)

    def _read(self) -> bool:
        """Take in what is new, and return whether lines were taken back since the last look."""
        known = bool(self._stays)
        for line in self._attempts.new():
            self._read_attempt(line)
        # Lines without these are nobody's of ours.
        replays = [self._read_event(line) for line in self._events.new() if line.keys() >= {"kind", "time", "step"}]
        for line in self._metrics.new():
            if "phases" in line and (stay := self._of_step(line.get("step", 0))) is not None:
                stay.steps.add(line)
                for name, part in split(line).items():
                    stay.seconds[name] = stay.seconds.get(name, 0.0) + part
        return known and any(replays)

    def _read_attempt(self, line: Line) -> None:
        self._supervised = True
        if "world_size" in line:
            self._stays.append(Stay(begin=line["time"]))
        elif "ended" in line and self._stays:
            last = self._stays[-1]
            last.end, last.how, last.reached = line["ended"], line["how"], line["step"]
        elif "over" in line and self._stays:
            self._stays[-1].over = line["time"]

    def _read_event(self, line: Line) -> bool:
        """Take in an event of rank 0; return whether it says that lines were taken back."""
        kind, number, data = line.get("kind"), line.get("attempt", 0), line.get("data", {})
        if not self._supervised:  # the ranks were started by somebody else, who counts nothing
            if kind == "start":
                self._stays.append(Stay(begin=line["time"]))
            number = len(self._stays) - 1
        if not 0 <= number < len(self._stays):
            return False
        stay = self._stays[number]
        if not self._supervised and kind in ("done", "stop"):
            stay.end = stay.over = line["time"]
        if kind == "ready":
            stay.start, stay.ready = line["step"], line["time"]
        elif kind == "started":
            stay.compile += data.get("compile", {}).get("seconds", 0.0)
        elif kind == "replay":
            for each, steps, highest in self._owners(line["step"], data["steps"]):
                each.steps.replayed += steps
                each.steps.replayed_seconds += steps / data["steps"] * data["seconds"]
                each.steps.highest = max(each.steps.highest, highest)
            if stay.start is not None:  # it went back while at work, and does from now on what others had done
                stay.start = min(stay.start, line["step"])
        stay.events.append((line["time"], ENDS.get(str(kind), "")))
        return kind == "replay"

    def _of_step(self, step: int) -> Stay | None:
        """Return the attempt that did `step` last: the latest one that went on from before it."""
        return next((stay for stay in reversed(self._stays) if stay.start is not None and stay.start < step), None)

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


def split(line: Line) -> dict[str, float]:
    """Return what the seconds of a step were spent on; they add up to its `step_seconds`."""
    phases = {name: seconds or 0.0 for name, seconds in line.get("phases", {}).items()}
    total = line.get("step_seconds") or sum(phases.values())
    waits = line.get("waits", {})
    data, save = phases.get("data", 0.0), phases.get("checkpoint", 0.0)
    left = max(0.0, total - data - save)
    straggler = min(left, waits.get("straggler") or 0.0)
    # Who waits for others waits in a collective, whichever phase that is in.
    exposed = max(phases.get("comm", 0.0), (waits.get("comm") or 0.0) + straggler)
    communication = min(left, exposed) - straggler
    compute = left - straggler - communication
    return {"data": data, "save": save, "straggler": straggler, "communication": communication, "compute": compute}


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
    compiling = min(stay.compile, stay.seconds.get("compute", 0.0))
    steps = stay.seconds | {"compile": compiling, "compute": stay.seconds.get("compute", 0.0) - compiling}
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

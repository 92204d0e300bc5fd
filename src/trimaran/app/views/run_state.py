"""A run as its files tell it: nothing here talks to the processes, so a run can be watched from anywhere."""

import math
import platform
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import psutil

from trimaran.app.views.logs import LogFollower, LogLine
from trimaran.core import EXIT_AGAIN, EXIT_DONE, PHASES, Event, Incident, StepMetrics, UserError, show_count
from trimaran.run import Follower, RunDirectory, read_incidents
from trimaran.run.attempts import Attempts
from trimaran.telemetry.ledger import Books, Ledger
from trimaran.telemetry.step_lines import read_details

Status = Literal["starting", "training", "restarting", "done", "stopped", "failed", "vanished"]
UNDER_WAY: tuple[Status, ...] = ("starting", "training", "restarting")
STOPPED = (EXIT_AGAIN, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGQUIT)  # exit codes

RECENT_STEPS = 20
MEASURED_STEPS = 1000
DETAILED_STEPS = 400  # whose details are kept, of all that were made
SAMPLE_BACKLOG = 1 << 16  # bytes of a node's samples that a first look goes back
FRESH_STEPS = 100  # of which the newest word about anything is looked for

DETAILS: dict[str, Callable[[Any], str]] = {
    "bubble": lambda told: f"{told['measured']:.0%} of the pipeline's time, {told['theoretical']:.0%} in theory",
    "router": lambda told: f"busiest expert {told['imbalance']:.2f} x the mean, {told['dropped']:.1%} dropped",
    "loss_scale": lambda told: f"{told:g}",
    "recompiles": lambda told: f"{told} after the first steps (see the `recompile` events)" if told else "",
    "towers": lambda told: "gradient norms " + _listed({name: each["grad_norm"] for name, each in told.items()}),
    "lrs": lambda told: _listed(told),
    "groups": lambda told: _groups(told),
    "losses": lambda told: _listed(told),
    "loader": lambda told: (
        f"{told['waited']:.2g} s waited for the batch; {told['workers']} processes, {told['depth']} batches ahead"
    ),
    "rows": lambda told: (
        _rows(told) if "padding" in told else ", ".join(f"{show_count(each)} {name}" for name, each in told.items())
    ),
}
_EVENT_FIELDS = {field.name for field in fields(Event)}


def _listed(told: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in told.items())


def _groups(told: dict[str, dict[str, float | None]]) -> str:
    """Return what is worth a line of all groups; a number that is not finite is None."""
    moved = {name: each["update_ratio"] for name, each in told.items() if each["update_ratio"] is not None}
    if not moved:
        return ""
    least, most = (choose(moved, key=moved.__getitem__) for choose in (min, max))
    return f"an update moves {most} by {moved[most]:.2g} of its weights, {least} by {moved[least]:.2g}"


def _rows(told: dict[str, float]) -> str:
    waste = told["padding"] / max(1.0, told["padding"] + told["tokens"])
    return f"{waste:.1%} padding, the slowest rank has {told['slowest'] / told['cost']:.2f} x the mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What the last thousand steps really cost, in the prediction's terms: medians, and the peak of the whole run.

    The first step warms up and counts only when it is alone.
    """

    step_seconds: float
    peak_bytes: int
    tokens_per_second: float
    mfu: float

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class RunState:
    """What the files of a run say so far. `refresh` reads what was added since the last look.

    `steps` come without their details. `latest` has the newest word about each of those, such as `ranks` and `memory`;
    `detailed` has all that was told at some steps, evenly spread over the run; `samples` how each node was doing last.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.events: list[Event] = []
        self.attempts = Attempts(run)
        self.samples: dict[str, dict[str, Any]] = {}
        self._sample_followers: dict[str, Follower] = {}
        self._books = Books(run)
        self._forget_steps()
        self._event_followers: dict[int, Follower] = {}
        self._log_followers: dict[int, LogFollower] = {}
        self._now: dict[int, list[Event]] = {}  # of each rank, since it was started last
        self._read_plan()

    def _read_plan(self) -> None:
        """Read what is run, and see to it that all of its ranks are followed: a run can get another plan on its way."""
        run = self.run
        try:
            self.recipe, self.plan = run.read_recipe(), run.read_plan()
        except (OSError, ValueError, KeyError):
            raise UserError("A008", "the recipe or the plan of this run cannot be read", where=str(run.path),
                            fix="wait if the run is just starting; otherwise start it again") from None  # fmt: skip
        for rank in range(self.plan.mesh.world_size):
            self._event_followers.setdefault(rank, Follower(run.events(rank)))
            self._log_followers.setdefault(rank, LogFollower(run.log(rank), rank))

    def _forget_steps(self) -> None:
        """Begin anew: some steps were taken back, and the books tell all of them again."""
        self.steps: list[StepMetrics] = []
        self.detailed: list[tuple[int, dict[str, Any]]] = []
        self.latest: dict[str, Any] = {}
        self._last_details: dict[str, Any] = {}
        self._every = 1

    def refresh(self) -> list[LogLine]:
        """Read on, and return the lines that the ranks have printed since the last look."""
        if self.attempts.refresh():
            self._read_plan()
        for follower in self._event_followers.values():
            for line in follower.new():
                if line.keys() >= {"kind", "rank", "time"}:  # else nobody of ours has written it
                    self._take(Event(**{key: line[key] for key in _EVENT_FIELDS & line.keys()}))
        self._read_steps()
        self._read_samples()
        return [line for follower in self._log_followers.values() for line in follower.new()]

    def _read_steps(self) -> None:
        if self._books.look():
            self._forget_steps()
        fresh: deque[bytes] = deque(maxlen=FRESH_STEPS)
        for line in self._books.steps():
            while self.steps and self.steps[-1].step >= line.step:  # taken back, and done again
                self.steps.pop()
            self.steps.append(line.metrics())
            fresh.append(line.rest)
            if len(self.steps) % self._every == 0:
                self._keep_details(line.step, line.rest)
        for rest in fresh:
            self.latest |= (details := read_details(rest))
            self._last_details = details

    def _keep_details(self, step: int, rest: bytes) -> None:
        """Keep what one step told; where there are many, of every second, every fourth, every eighth ... step."""
        while self.detailed and self.detailed[-1][0] >= step:
            self.detailed.pop()
        self.detailed.append((step, read_details(rest)))
        if len(self.detailed) >= 2 * DETAILED_STEPS:
            self.detailed, self._every = self.detailed[1::2], 2 * self._every

    def _read_samples(self) -> None:
        """Read how the machines of the run are doing: the last word of each node."""
        for path in self.run.samples(0).parent.glob("node-*.jsonl"):
            follower = self._sample_followers.setdefault(path.name, Follower(path, backlog=SAMPLE_BACKLOG))
            for line in follower.new():
                self.samples[path.name] = line

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "start":
            self._now[event.rank] = []
        self._now.setdefault(event.rank, []).append(event)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def now(self, kind: str) -> list[Event]:
        """Return the events of the ranks that were started last."""
        return [event for events in self._now.values() for event in events if event.kind == kind]

    @property
    def status(self) -> Status:
        if self.attempts.attempts or self.attempts.over is not None:
            return self._status_by_supervisor()
        if self.failure is not None:
            return "failed"
        if self.now("stop") and self.step < self.recipe.train.steps:
            return "stopped"
        if any(event.rank == 0 for event in self.now("done")):
            return "done"
        start = next((event for event in self.now("start") if event.rank == 0), None)
        if start is not None and not _lives(start.data.get("host"), start.data.get("pid"), start.time):
            return "vanished"
        return "training" if self.steps else "starting"

    def _status_by_supervisor(self) -> Status:
        """Return what the supervisor's last words say; while there are none, whether it lives and what it does."""
        if (over := self.attempts.over) is not None:
            return "done" if over == EXIT_DONE else "stopped" if over in STOPPED else "failed"
        last = self.attempts.attempts[-1]
        if not _lives(last.host, last.pid, last.time):
            return "vanished"
        ready = any(event.attempt == last.number for event in self.now("ready"))
        if last.ended is None and ready and self.steps:
            return "training"
        before = self.attempts.attempts[-2:][0]
        return "restarting" if "trouble" in (before.how, last.how) else "starting"

    @property
    def restarts(self) -> int:
        """How often ranks were started again after trouble."""
        return sum(attempt.how == "trouble" for attempt in self.attempts.attempts[:-1])

    @property
    def incidents(self) -> list[Incident]:
        """What went wrong so far."""
        return read_incidents(self.run)

    @property
    def ledger(self) -> Ledger | None:
        """Where the time since launch went, up to now for a run at work; None before there is any.

        It is made of what `refresh` has read: asking often costs nothing to speak of.
        """
        ledger = self._books.balance(now=time.time() if self.status in UNDER_WAY else None)
        return ledger if ledger.at_work > 0 else None

    @property
    def failure(self) -> Event | None:
        """The first error that a rank reported; a person's mistake comes before the faults that follow from it."""
        return min(self.now("error"), key=lambda event: ("code" not in event.data, event.time), default=None)

    @property
    def silent_ranks(self) -> list[int]:
        """The ranks that started and never said how they ended."""
        ended = {event.rank for kind in ("error", "done") for event in self.now(kind)}
        return sorted({event.rank for event in self.now("start")} - ended)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.steps[-1].step if self.steps else 0

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Steps and their losses on data that was never trained on."""
        found = {event.step: event.data["loss"] for event in self.of_kind("evaluation") if event.rank == 0}
        return [(step, math.nan if loss is None else loss) for step, loss in sorted(found.items())]

    @property
    def accuracy(self) -> dict[str, float]:
        """What of the held-out data was right when it was last looked at, by what was asked."""
        found = [event.data.get("accuracy", {}) for event in self.of_kind("evaluation") if event.rank == 0]
        return found[-1] if found else {}

    @property
    def measured(self) -> StepSummary | None:
        if not self.steps:
            return None
        warm = self.steps[1:][-MEASURED_STEPS:] or self.steps
        return StepSummary(
            step_seconds=statistics.median(step.step_seconds for step in warm),
            peak_bytes=max(step.peak_bytes for step in self.steps),
            tokens_per_second=statistics.median(step.tokens_per_second for step in warm),
            mfu=statistics.median(step.mfu for step in warm),
        )

    @property
    def differences(self) -> dict[str, float]:
        """How far what was measured lies from what was predicted, as a share of that: 0.1 is a tenth more."""
        predicted, measured = self.plan.prediction, self.measured
        if predicted is None or measured is None:
            return {}
        pairs = {name: (value, getattr(predicted, name)) for name, value in measured.as_dict().items()}
        return {name: after / before - 1 for name, (after, before) in pairs.items() if before > 0}

    @property
    def details(self) -> list[tuple[str, str]]:
        """What only some plans have, of the last step: names and words."""
        told = self._last_details
        names = {"rows": "scenes a step"} if self.unit == "scenes" else {}
        words = ((names.get(name, name), show(told[name])) for name, show in DETAILS.items() if name in told)
        return [(name, each) for name, each in words if each]

    @property
    def unit(self) -> str:
        """What is counted by the second."""
        return "scenes" if self.recipe.model.family == "perception" else "tokens"

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones."""
        recent = self.steps[1:][-RECENT_STEPS:]
        if not recent or self.status != "training":
            return None
        pace = statistics.median(step.step_seconds for step in recent)
        return pace * (self.recipe.train.steps - self.steps[-1].step)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a recent step by phase, those that took no time left out."""
        recent = (self.steps[1:] or self.steps)[-RECENT_STEPS:]
        means = {name: sum(step.phases.get(name, 0.0) for step in recent) / max(1, len(recent)) for name in PHASES}
        return {name: seconds for name, seconds in means.items() if seconds > 0}

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: strict JSON, a number that is not finite is null."""
        measured, failure, ledger = self.measured, self.failure, self.ledger
        return {
            "run_dir": str(self.run.path),
            "status": self.status,
            "steps": self.step,
            "total_steps": self.recipe.train.steps,
            "first_loss": finite(self.losses[:1]),
            "final_loss": finite(self.losses[-1:]),
            "held_out_loss": finite(loss for _, loss in self.evaluations[-1:]),
            "accuracy": self.accuracy,
            "tokens_per_second": measured.tokens_per_second if measured else None,
            "plan": self.plan.model_dump(mode="json"),
            "prediction": self.plan.prediction.model_dump(mode="json") if self.plan.prediction else None,
            "measured": measured.as_dict() if measured else None,
            "differences": self.differences,
            "phases": self.phases,
            "details": {name: told for name, told in self._last_details.items() if name in DETAILS},
            "ranks": self.latest.get("ranks"),
            "memory": self.latest.get("memory"),
            "machines": list(self.samples.values()),
            "samples": [event.data for event in self.of_kind("sample")],
            "error": failure.data | {"rank": failure.rank} if failure else None,
            "attempts": len(self.attempts.attempts),
            "restarts": self.restarts,
            "goodput": ledger.goodput if ledger else None,
            "ledger": ledger.as_dict() if ledger else None,
            "incidents": [incident.as_dict() for incident in self.incidents],
        }


def _lives(host: str | None, pid: int | None, since: float) -> bool:
    """Whether a process may still be at work; only one of this host that is gone, or a newer one, says no."""
    if host != platform.node() or pid is None:
        return True
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since
    except psutil.NoSuchProcess:
        return False


def finite(values: Iterable[float]) -> float | None:
    """Return the one value if there is one and JSON can hold it."""
    return next((value for value in values if math.isfinite(value)), None)

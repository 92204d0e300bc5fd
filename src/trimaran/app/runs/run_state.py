"""The state of a run, read from its files only, so that a run can be watched from any machine."""

import math
import os
import platform
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, Literal

import psutil

from trimaran.app.runs.step_history import StepHistory
from trimaran.app.show.terminal import LogFollower, LogLine
from trimaran.core import EXIT_AGAIN, EXIT_DONE, PHASES, SLOW_DETAILS, Decision, Event, Incident, show_count
from trimaran.runs import Ledger, LedgerReader, RunDirectory, RunReader, is_number, lines_from_end, plan_tree
from trimaran.runs.journal import LongLine
from trimaran.runs.read.step_index import StepBlock, StepIndexer
from trimaran.runs.read.step_lines import StepLine, read_details

Status = Literal["starting", "training", "restarting", "done", "stopped", "failed", "vanished"]
ACTIVE_STATUSES: tuple[Status, ...] = ("starting", "training", "restarting")
STOPPED = (EXIT_AGAIN, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGQUIT)  # exit codes

RECENT_STEPS = 20
MEASURED_STEPS = 1000
SAMPLE_BACKLOG = 1 << 16  # bytes of a node's samples that the first refresh reads
REBUILT_BLOCKS = 64  # of a missing index, in one refresh
FRESH_STEPS = 512  # newest steps in which `latest` details are searched


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def _groups(groups: dict[str, dict[str, float | None]]) -> str:
    """Return the largest and the smallest update ratio of all groups; NaN and Inf are None in the file."""
    ratios = {name: each["update_ratio"] for name, each in groups.items() if each["update_ratio"] is not None}
    if not ratios:
        return ""
    least, most = (choose(ratios, key=ratios.__getitem__) for choose in (min, max))
    return f"update / weight: largest {ratios[most]:.2g} in {most}, smallest {ratios[least]:.2g} in {least}"


def _rows(rows: dict[str, float]) -> str:
    if "padding" not in rows:
        return ", ".join(f"{show_count(each)} {name}" for name, each in rows.items())
    waste = rows["padding"] / max(1.0, rows["padding"] + rows["tokens"])
    return f"{waste:.1%} padding, the slowest rank has {rows['slowest'] / rows['cost']:.2f} x the mean"


DETAILS: dict[str, Callable[[Any], str]] = {
    "bubble": lambda value: f"{value['measured']:.0%} of the pipeline's time, {value['theoretical']:.0%} in theory",
    "router": lambda value: f"busiest expert {value['imbalance']:.2f} x the mean, {value['dropped']:.1%} dropped",
    "loss_scale": lambda value: f"{value:g}",
    "compression_error": lambda value: f"the sum of compressed gradients was {value:.2g} of its size off",
    "async_sgd": lambda value: f"gradients {value['staleness']:.1f} updates stale, at most {value['max_staleness']}",
    "recompiles": lambda value: f"{value} after the first steps (see the `recompile` events)" if value else "",
    "towers": lambda value: "gradient norms " + _listed({name: each["grad_norm"] for name, each in value.items()}),
    "lrs": _listed,
    "groups": _groups,
    "losses": _listed,
    "loader": lambda value: (
        f"{value['waited']:.2g} s waited for the batch; {value['workers']} processes, {value['depth']} batches ahead"
    ),
    "rows": _rows,
}
_EVENT_FIELDS = {field.name for field in fields(Event)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Medians of the last thousand warm steps, and the run's peak memory, with the prediction's names."""

    step_seconds: float
    peak_bytes: int
    tokens_per_second: float
    mfu: float | None  # None: the device's peak is not known


class RunState:
    """The state of a run from its files. `refresh` reads what was added since the last call.

    `history` has all steps, without details, in bounded memory. `latest` has the newest value of each detail, such as
    `ranks` and `memory`. `samples` has the last sample of each node. With `only_status`, only the last steps are read:
    enough for `status`, `step` and the events, in a time that does not depend on the length of the run.
    """

    def __init__(self, run: RunDirectory, *, only_status: bool = False) -> None:
        self.run, self._only_status = run, only_status
        self.events: list[Event] = []
        self._reader = RunReader(run)
        self.attempts = self._reader.attempts
        self.samples: dict[str, dict[str, Any]] = {}
        self._ledger_reader = LedgerReader(run, num_lines=MEASURED_STEPS)
        self._indexer: StepIndexer | None = StepIndexer(run.metrics, run.metrics_index)
        self._knows_end = False  # where the last steps begin
        self._forget_steps()
        self._log_followers: dict[int, LogFollower] = {}
        self._current: dict[int, list[Event]] = {}  # of each rank, since its last start
        self._read_plan()

    def _read_plan(self) -> None:
        """Read recipe and plan, and follow all ranks of the plan: a restart can change the plan."""
        run = self.run
        self.recipe, self.plan = run.read_recipe(), run.read_plan()
        for rank in range(self.plan.mesh.world_size):
            if rank not in self._log_followers:
                self._log_followers[rank] = LogFollower(self._reader, rank)

    def _forget_steps(self) -> None:
        """Clear all steps: some were withdrawn, and the reader returns all of them again."""
        self.history = StepHistory()
        self.latest: dict[str, Any] = {}
        self._last_details: dict[str, Any] = {}
        self._comm: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)  # `comm_seconds` of the newest steps

    def refresh(self) -> list[LogLine]:
        """Read what is new, and return the log lines of the ranks since the last call."""
        if self._reader.read_attempts():
            self._read_plan()
        for rank in list(self._log_followers):
            for line in self._reader.events(rank):
                if line.keys() >= {"kind", "rank", "time"}:  # otherwise it is not one of our events
                    event = Event(**{key: line[key] for key in _EVENT_FIELDS & line.keys()})
                    self.events.append(event)
                    if event.kind == "change" and event.data.get("status") == "applied":
                        self._read_plan()
                    if event.kind == "start":
                        self._current[event.rank] = []
                    self._current.setdefault(event.rank, []).append(event)
        fresh: deque[bytes] = deque(maxlen=FRESH_STEPS)
        if self._only_status:
            if not self._knows_end:
                self._knows_end, last = True, islice(lines_from_end(self.run.metrics), 2)
                self._reader.skip_to(self.run.metrics, min((at for at, _ in last), default=0))
            steps: Iterator[StepLine | StepBlock] = self._reader.steps()
        else:
            if self._ledger_reader.poll() or self._rebuild_index():
                self._forget_steps()
            steps = self._ledger_reader.new_steps()
        for step in steps:
            if isinstance(step, StepBlock):
                self.history.add_block(step)
            else:
                self.history.add(step)
                fresh.append(step.rest)
        for rest in fresh:
            self.latest |= (details := read_details(rest))
            self._last_details = details
            if isinstance(seconds := details.get("comm_seconds"), dict):
                self._comm.append(seconds)
        for path in self.run.samples(0).parent.glob("node-*.jsonl"):
            for line in self._reader.follow(path, backlog=SAMPLE_BACKLOG).records(path):
                self.samples[path.name] = line
        return [line for follower in self._log_followers.values() for line in follower.new()]

    def _rebuild_index(self) -> bool:
        """Extend the missing index of an ended run of ours; return whether all steps are to be read again."""
        if not self.num_estimated or self._indexer is None or self.status in ACTIVE_STATUSES:
            return False
        try:
            if self.run.metrics.stat().st_uid == os.geteuid() and self._indexer.extend(REBUILT_BLOCKS):
                return False
        except OSError:  # the estimates stay
            self._indexer = None
            return False
        self._indexer = None
        self._ledger_reader.reopen()
        return True

    @property
    def num_estimated(self) -> int:
        """How many steps of a long past without an index were not read: sums and curves are estimates there."""
        return 0 if self._only_status else self._ledger_reader.steps.num_estimated

    @property
    def long_lines(self) -> list[LongLine]:
        """The lines of metrics and events that are too long to be ours, and were skipped."""
        events = map(self.run.events, self._log_followers)
        return [*self._ledger_reader.steps.long_lines, *self._reader.long_lines(*events)]

    @property
    def steps(self) -> list[StepLine]:
        """The latest steps; of a short run all of them."""
        return self.history.steps

    def events_of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def events_of_rank(self, rank: int) -> list[Event]:
        """Return the events of a rank since its last start."""
        return self._current.get(rank, [])

    def current_events(self, kind: str) -> list[Event]:
        """Return the events of each rank since its last start."""
        return [event for events in self._current.values() for event in events if event.kind == kind]

    @property
    def status(self) -> Status:
        if self.attempts.attempts or self.attempts.over is not None:
            # The status by the supervisor's last entry; while there is none, by whether its process is alive.
            if (over := self.attempts.over) is not None:
                return "done" if over == EXIT_DONE else "stopped" if over in STOPPED else "failed"
            last = self.attempts.attempts[-1]
            if not _may_be_alive(last.host, last.pid, last.time):
                return "vanished"
            ready = any(event.attempt == last.number for event in self.current_events("ready"))
            if last.ended is None and ready and self.steps:
                return "training"
            before = self.attempts.attempts[-2:][0]
            return "restarting" if "trouble" in (before.how, last.how) else "starting"
        if self.failure is not None:
            return "failed"
        if self.current_events("stop") and self.step < self.recipe.train.steps:
            return "stopped"
        if any(event.rank == 0 for event in self.current_events("done")):
            return "done"
        start = next((event for event in self.current_events("start") if event.rank == 0), None)
        if start is not None and not _may_be_alive(start.data.get("host"), start.data.get("pid"), start.time):
            return "vanished"
        return "training" if self.steps else "starting"

    @property
    def activity(self) -> str:
        """What a run without steps is doing: loading torch, building the model, compiling a function."""
        world_size = self.plan.mesh.world_size
        started, ready = len(self.current_events("start")), len(self.current_events("ready"))
        ranks = "rank" if world_size == 1 else "ranks"
        if (compiling := self.compiling) is not None:
            return f"compiling {compiling.data.get('what')} (function {compiling.data.get('number')})"
        if ready:
            return f"{ready} of {world_size} {ranks} ready, first step running"
        if started:
            return f"{started} of {world_size} {ranks} up, building the model"
        return f"starting {world_size} {ranks} (loading torch)"

    @property
    def compiling(self) -> Event | None:
        """The event of the function that rank 0 compiles now; None if it compiles nothing."""
        newest = next((event for event in reversed(self._current.get(0, [])) if event.kind == "compile"), None)
        return newest if newest is not None and "seconds" not in newest.data else None

    @property
    def restarts(self) -> int:
        """How often the ranks were restarted after a failure."""
        return sum(attempt.how == "trouble" for attempt in self.attempts.attempts[:-1])

    @property
    def incidents(self) -> list[Incident]:
        """The incidents so far."""
        return self._reader.incidents()

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of the autopilot so far, each in its latest state."""
        self._reader.new_decisions()
        return list(self._reader.decisions.values())

    @property
    def ledger(self) -> Ledger | None:
        """Where the time since launch went, by what `refresh` has read; None before there is any."""
        assert not self._only_status
        ledger = self._ledger_reader.compute(now=time.time() if self.status in ACTIVE_STATUSES else None)
        return ledger if ledger.at_work > 0 else None

    @property
    def loss_bound(self) -> dict[str, Any]:
        """What a fault costs at most, as rank 0 stated it last; empty before its first step."""
        return next((event.data for event in reversed(self.events) if event.kind == "loss_bound"), {})

    @property
    def measured_rows(self) -> dict[str, Any]:
        """The rows of each data rank by its measured speed, as the last start dealt them; empty if none did."""
        return next((event.data for event in reversed(self.events) if event.kind == "rows"), {})

    @property
    def last_change(self) -> Event | None:
        """The answer to the last request to change the plan of the running run; None without any."""
        return next((event for event in reversed(self.events) if event.kind == "change"), None)

    @property
    def failure(self) -> Event | None:
        """The first error that a rank reported; a user's mistake comes before the faults that it causes."""
        return min(self.current_events("error"), key=lambda event: ("code" not in event.data, event.time), default=None)

    @property
    def silent_ranks(self) -> list[int]:
        """The ranks that started and have no event about their end."""
        ended = {event.rank for kind in ("error", "done") for event in self.current_events(kind)}
        return sorted({event.rank for event in self.current_events("start")} - ended)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.steps[-1].step if self.steps else 0

    @property
    def first_loss(self) -> float:
        """The loss of the first step; NaN if there is none."""
        return self.history.first.loss if self.history.first else math.nan

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Steps and their losses on held-out data."""
        found = {event.step: event.data.get("loss") for event in self.events_of_kind("evaluation") if event.rank == 0}
        return [(step, math.nan if loss is None else loss) for step, loss in sorted(found.items())]

    @property
    def accuracy(self) -> dict[str, float]:
        """The accuracy of the last evaluation on held-out data, by task."""
        return self._last_evaluation("accuracy")

    @property
    def accuracy_counts(self) -> dict[str, float]:
        """Of how many held-out answers, tokens or cells each accuracy is; empty for a run of an older version."""
        return self._last_evaluation("accuracy_counts")

    def _last_evaluation(self, name: str) -> dict[str, float]:
        found = [event.data.get(name, {}) for event in self.events_of_kind("evaluation") if event.rank == 0]
        return found[-1] if found else {}

    @property
    def measured(self) -> StepSummary | None:
        if not self.steps:
            return None
        warm, peak = self._warm_steps[-MEASURED_STEPS:] or self.steps, self.history.extent("peak_bytes")
        return StepSummary(
            step_seconds=statistics.median(step.step_seconds for step in warm),
            peak_bytes=int(peak.most[1]) if peak else 0,
            tokens_per_second=statistics.median(step.tokens_per_second for step in warm),
            mfu=None if self.no_mfu else statistics.median(step.mfu for step in warm),
        )

    @property
    def no_mfu(self) -> str:
        """Why the run has no MFU; empty if it has one."""
        prediction = self.plan.prediction
        if prediction is None:
            return "the plan has no prediction, so that its FLOPs are not known"
        return "" if prediction.mfu_is_known else prediction.no_mfu or "the peak of this CPU is not known"

    @property
    def _warm_steps(self) -> list[StepLine]:
        """The latest steps without the first of the run, and only those after the last change of its plan."""
        changes = [event.step for event in self.events_of_kind("change") if event.data.get("status") == "applied"]
        if changes and self.step > changes[-1] + 1:
            return [step for step in self.steps if step.step > changes[-1] + 1]
        return self.steps[1:] if self.steps[:1] == [self.history.first] else self.steps

    @property
    def differences(self) -> dict[str, float]:
        """The relative difference of measured and predicted values: 0.1 is a tenth more than predicted."""
        predicted, measured = self.plan.prediction, self.measured
        if predicted is None or measured is None:
            return {}
        pairs = {name: (value, getattr(predicted, name)) for name, value in asdict(measured).items()}
        return {name: after / before - 1 for name, (after, before) in pairs.items() if after is not None and before > 0}

    @property
    def details(self) -> list[tuple[str, str]]:
        """Details of the last step that only some plans have: names and texts."""
        details = self._shown_details
        names = {"rows": "scenes a step"} if self.unit == "scenes" else {}
        texts: list[tuple[str, str]] = []
        for name, show in DETAILS.items():
            # The fields of a detail depend on the plan and are not checked: a damaged one is left out.
            with suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                if name in details and (text := show(details[name])):
                    texts.append((names.get(name, name), text))
        return texts

    @property
    def _shown_details(self) -> dict[str, Any]:
        """The details of the last step, and the newest of those that most lines leave out."""
        return {name: self.latest[name] for name in SLOW_DETAILS if name in self.latest} | self._last_details

    @property
    def unit(self) -> str:
        """The unit of throughput."""
        return "scenes" if self.recipe.model.kind.reads == "scenes" else "tokens"

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the last step at the median step time of recent steps."""
        recent = self._warm_steps[-RECENT_STEPS:]
        if not recent or self.status != "training":
            return None
        step_seconds = statistics.median(step.step_seconds for step in recent)
        return step_seconds * (self.recipe.train.steps - self.steps[-1].step)

    @property
    def phases(self) -> dict[str, float]:
        """Mean seconds of recent steps by phase, without phases that took no time."""
        recent = (self._warm_steps or self.steps)[-RECENT_STEPS:]
        means = {name: sum(step.phases.get(name, 0.0) for step in recent) / max(1, len(recent)) for name in PHASES}
        return {name: seconds for name, seconds in means.items() if seconds > 0}

    @property
    def comm_seconds(self) -> dict[str, float | None]:
        """Mean exposed communication of recent steps by axis, in seconds; None for an axis that is not measured."""
        if not self._comm:
            return {}
        found = {axis: [each[axis] for each in self._comm if is_number(each.get(axis))] for axis in self._comm[-1]}
        is_known = {axis: len(each) == len(self._comm) for axis, each in found.items()}
        return {axis: sum(each) / len(each) if is_known[axis] else None for axis, each in found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: strict JSON, where NaN and Inf are null."""
        measured, failure, ledger = self.measured, self.failure, self.ledger
        return {
            "run_dir": str(self.run.path),
            "status": self.status,
            "steps": self.step,
            "total_steps": self.recipe.train.steps,
            "first_loss": finite([self.first_loss]),
            "final_loss": finite(step.loss for step in self.steps[-1:]),
            "held_out_loss": finite(loss for _, loss in self.evaluations[-1:]),
            "accuracy": self.accuracy,
            "accuracy_counts": self.accuracy_counts,
            "tokens_per_second": measured.tokens_per_second if measured else None,
            **plan_tree(self.plan),
            "measured": asdict(measured) if measured else None,
            "no_mfu": self.no_mfu or None,
            "differences": self.differences,
            "phases": self.phases,
            "comm_seconds": self.comm_seconds,
            "details": {name: value for name, value in self._shown_details.items() if name in DETAILS},
            "ranks": self.latest.get("ranks"),
            "measured_rows": self.measured_rows or None,
            "decisions": [each.as_dict() for each in self.decisions],
            "memory": self.latest.get("memory"),
            "machines": list(self.samples.values()),
            "samples": [event.data for event in self.events_of_kind("sample")],
            "error": failure.data | {"rank": failure.rank} if failure else None,
            "attempts": len(self.attempts.attempts),
            "restarts": self.restarts,
            "changes": [event.data | {"step": event.step} for event in self.events_of_kind("change")],
            "loss_bound": self.loss_bound or None,
            "goodput": ledger.goodput if ledger else None,
            "ledger": ledger.as_dict() if ledger else None,
            "incidents": [incident.as_dict() for incident in self.incidents],
            "estimated_steps": self.num_estimated,
            "skipped_lines": [each._asdict() for each in self.long_lines],
        }


def _may_be_alive(host: str | None, pid: int | None, since: float) -> bool:
    """Return whether a process may be alive. It is not if this host has no such process, or a newer one."""
    if host != platform.node() or pid is None:
        return True
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since
    except psutil.NoSuchProcess:
        return False


def read_state(run: RunDirectory, *, only_status: bool = True) -> RunState:
    """Return the state of a run as it is now."""
    state = RunState(run, only_status=only_status)
    state.refresh()
    return state


def finite(values: Iterable[float]) -> float | None:
    """Return the first finite value, or None: JSON has no NaN and no Inf."""
    return next((value for value in values if math.isfinite(value)), None)


def accuracy_texts(accuracy: Mapping[str, float], counts: Mapping[str, float]) -> list[str]:
    """Return each accuracy as text, such as `answers 50.0% of 2`."""
    of = {name: f" of {count:,.0f}" for name, count in counts.items()}
    return [f"{name} {fraction:.1%}{of.get(name, '')}" for name, fraction in accuracy.items()]

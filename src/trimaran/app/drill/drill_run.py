"""Injects faults into a run, observes it until it recovers, and judges. Times are seconds since the fault."""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from rich.console import Console

from trimaran.app.drill.inject import (
    DrillFault,
    RunProcesses,
    find_peers,
    find_processes,
    inject,
    oldest_loader,
    refuse_shared_disk,
)
from trimaran.app.recipe.request import Request
from trimaran.app.train.session import create_checked_run
from trimaran.core import EXIT_AGAIN, Incident, UserError
from trimaran.launch import LocalRun, start_local
from trimaran.runs import RunDirectory, RunReader, append_line, read_attempts, read_json_lines

LOADER_REPLACED = "loader worker "  # how a rank logs that it replaced a loader process, see `data/worker_pool.py`
STEPS_AFTER = 3  # new steps after a fault that restarts nothing, until the run counts as recovered


@dataclass(slots=True, kw_only=True)
class Observed:
    """What a run has written since a fault: each entry with its seconds."""

    step_before: int  # the highest step with metrics before the fault
    steps: list[tuple[float, int]] = field(default_factory=list)  # with metrics
    starts: list[tuple[float, int]] = field(default_factory=list)  # steps that later attempts started from
    incidents: list[tuple[float, Incident]] = field(default_factory=list)  # every line of every new one
    log_lines: list[tuple[float, str]] = field(default_factory=list)
    undone: float | None = None  # when a lasting fault was undone
    gone: float | None = None  # when the last process of the run ended
    exit_code: int | None = None  # written by the supervisor at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """The result of a drill; a line of `drills.jsonl`. Seconds and steps are None if unknown, or if none apply."""

    fault: str  # its title
    kind: str
    time: float  # when it was injected, in seconds since the epoch
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    lost_steps: int | None = None
    incident: str | None = None
    cause: str | None = None
    suspects: tuple[int, ...] = ()
    named: bool = False  # the incident has an expected cause, and exactly the fault's rank
    passed: bool = False
    note: str = ""  # what is missing, or what to do next


def notice_of(fault: DrillFault, seen: Observed) -> tuple[float | None, Incident | None]:
    """Return when the run had noticed the fault, and its incident as it was last written; None if there is none yet.

    It is the first with an expected cause and rank; else the first other one, which was then wrongly attributed. Slow
    ranks that are found by the way do not count.
    """
    if not fault.kind.causes:
        return next((at for at, line in seen.log_lines if LOADER_REPLACED in line), None), None
    newest = {incident.id: incident for _, incident in seen.incidents}
    candidates = [each for each in newest.values() if each.cause != "straggler" or "straggler" in fault.kind.causes]
    if not candidates:
        return None, None
    found = min(candidates, key=lambda each: not is_named(fault, each))
    known = (found.id, found.cause, found.suspects)
    return next(at for at, each in seen.incidents if (each.id, each.cause, each.suspects) == known), found


def is_named(fault: DrillFault, incident: Incident) -> bool:
    """Return whether the incident has an expected cause, and names the rank of the fault and no other."""
    names_rank = not fault.kind.names_rank or incident.suspects == (fault.rank,)
    return incident.cause in fault.kind.causes and names_rank


def highest_step_before_restart(fault: DrillFault, seen: Observed) -> int:
    """Return the highest step that was finished before the ranks were started again."""
    restarted = min((at for at, _ in seen.starts), default=float("inf"))
    steps = [step for at, step in seen.steps if at < restarted]
    _, incident = notice_of(fault, seen)
    known = incident.step if incident and fault.kind.restarts else 0
    return max([seen.step_before, known, *steps])


def recovered_at(fault: DrillFault, seen: Observed) -> float | None:
    """Return when the run finished a new step, or some new steps if nothing restarts; None if it has not."""
    if fault.kind.restarts or fault.kind.ends_run:
        if not seen.starts:
            return None
        floor, since = highest_step_before_restart(fault, seen), seen.starts[0][0]
        return next((at for at, step in seen.steps if at >= since and step > floor), None)
    noticed, _ = notice_of(fault, seen)
    since = max(noticed or 0.0, seen.undone or 0.0)
    if noticed is None or (fault.kind.lasts and seen.undone is None):
        return None
    highest, new = seen.step_before, []  # when steps that had no metrics before were finished, each once
    for at, step in seen.steps:
        if step > highest:
            highest = step
            new += [at] if at >= since else []
    return new[STEPS_AFTER - 1] if len(new) >= STEPS_AFTER else None


def is_complete(fault: DrillFault, seen: Observed, *, can_resume: bool) -> bool:
    """Return whether nothing more is to be observed. `can_resume`: the drill starts a run again that has ended."""
    if fault.kind.ends_run and not can_resume:
        return seen.gone is not None
    detected, incident = notice_of(fault, seen)
    if detected is None or recovered_at(fault, seen) is None:
        return False
    return incident is None or incident.action is not None


def judge(fault: DrillFault, seen: Observed, *, time: float, can_resume: bool, within: float) -> DrillResult:
    """Return the result of a drill that is over, because it is complete or its time is up."""
    detected, incident = notice_of(fault, seen)
    recovered = recovered_at(fault, seen)
    named = is_named(fault, incident) if incident else detected is not None
    needs_resume = fault.kind.ends_run and not can_resume
    is_needless = bool(seen.starts) and not (fault.kind.restarts or fault.kind.ends_run)
    if needs_resume and fault.kind.name == "terminate":
        passed = named and seen.exit_code == EXIT_AGAIN and seen.gone is not None
    elif needs_resume:
        passed = seen.gone is not None  # no process is left that could name a killed supervisor: the next start does
    else:
        in_time = all(each is not None and each <= within for each in (detected, recovered))
        passed = named and in_time and not is_needless
    note = "" if recovered is not None else f"no new step within {within:.0f} s"
    if needs_resume and seen.gone is not None:
        code = f" with exit code {seen.exit_code}" if seen.exit_code is not None else ""
        note = f"all processes ended after {seen.gone:.1f} s{code}; `trimaran resume` continues the run"
    elif is_needless:
        note = "the ranks were started again, which this fault does not need"
    elif detected is None:
        note = f"not noticed within {within:.0f} s"
    elif incident is not None and not named:
        ranks = f" of rank {', '.join(map(str, incident.suspects))}" if incident.suspects else ""
        note = f"wrongly attributed: {incident.cause}{ranks}: {incident.what}"
    if seen.starts:
        lost = max(0, highest_step_before_restart(fault, seen) - seen.starts[0][1])
    else:  # unknown if the ranks should have been started again
        lost = None if fault.kind.restarts or fault.kind.ends_run else 0
    return DrillResult(
        fault=fault.title,
        kind=fault.kind.name,
        time=time,
        detected_seconds=None if detected is None else round(detected, 3),
        recovered_seconds=None if needs_resume or recovered is None else round(recovered, 3),
        lost_steps=lost,
        incident=incident.id if incident else None,
        cause=incident.cause if incident else None,
        suspects=incident.suspects if incident else (),
        named=named,
        passed=passed,
        note=note,
    )


POLL_SECONDS = 0.02
SLOW_POLL_SECONDS = 0.2  # of files that are read whole, and of processes
METRICS_BACKLOG_BYTES = 256 << 10
STEADY_STEPS = 10  # in the newest attempt before a fault; more for a slow rank, which is compared with earlier steps
STEADY_STEPS_BEFORE_SLOW = 40
START_SECONDS = 900.0  # for the run to reach those steps, if the recipe allows no more for its start
BASE_SECONDS = 60.0
MAX_TRIES = 3
WAITING = "waiting for the run to notice it"
Show = Callable[[str], None]
STEPS = 10_000_000  # more than any drill lasts
CHECKPOINT_EVERY = 20  # steps, if the recipe leaves it to Trimaran: several faults need a checkpoint on disk
STOP_SECONDS = 60.0


def drills_file(run: RunDirectory) -> Path:
    """The drills of a run: a line when a drill has started the run, and one for each result."""
    return run.path / "drills.jsonl"


def mark_as_own(run: RunDirectory) -> None:
    """Note that a drill has started this run, and so may do anything to it."""
    append_line(drills_file(run), {"started_by_drill": True, "time": time.time()})


def is_own(run: RunDirectory) -> bool:
    return any(each.get("started_by_drill") is True for each in read_json_lines(drills_file(run)))


class RunObserver:
    """Reads what a run writes from now on. Seconds count from `restart_clock`."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._reader = RunReader(run).follow(run.metrics, backlog=METRICS_BACKLOG_BYTES)
        lines = [*self._reader.metrics()]
        self.step_seconds = statistics.median([each.get("step_seconds") or 0.0 for each in lines] or [0.0])
        self.seen = Observed(step_before=max((each.get("step", 0) for each in lines), default=0))
        self._known = {each.id: each for each in self._reader.incidents()}
        self._earlier = frozenset(self._known)
        self._logs = sorted((run.path / "logs").glob("rank-*.log"))
        self._reader.follow(run.events(0), *self._logs, backlog=0)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def restart_clock(self) -> None:
        """Call it right before the fault: steps that were finished until now are before it."""
        steps = [each.get("step", 0) for each in self._reader.metrics()]
        self.seen.step_before = max([self.seen.step_before, *steps])
        self._began = time.monotonic()

    def poll(self) -> None:
        now, seen = self.seconds, self.seen
        seen.steps += [(now, each["step"]) for each in self._reader.metrics() if isinstance(each.get("step"), int)]
        found = {each.id: each for each in self._reader.incidents()}
        changed = [each for each in found.values() if each.id not in self._earlier and self._known.get(each.id) != each]
        self._known = found
        seen.incidents += [(now, each) for each in changed]
        seen.starts += [(now, each.get("step", 0)) for each in self._reader.events() if each.get("kind") == "ready"]
        lines = (line for path in self._logs for line in self._reader.lines(path))
        seen.log_lines += [(now, line.decode(errors="replace")) for line in lines]


class OwnRun:
    """Creates a run of a recipe and starts it; the end of the `with` block stops it, with a checkpoint."""

    def __init__(self, request: Request, path: Path, console: Console) -> None:
        # Enough steps for any drill, and frequent checkpoints unless the recipe sets them.
        recipe = request.recipe
        every = CHECKPOINT_EVERY if recipe.checkpoint.every in ("auto", "off") else recipe.checkpoint.every
        sections = {
            "train": recipe.train.model_copy(update={"steps": STEPS}),
            "data": recipe.data.model_copy(update={"epochs": 0}),
            "checkpoint": recipe.checkpoint.model_copy(update={"every": every}),
        }
        endless = replace(request, recipe=recipe.model_copy(update=sections))
        self.run: RunDirectory = create_checked_run(endless, path, console)
        mark_as_own(self.run)
        self._supervisor: LocalRun = start_local(self.run)

    def is_alive(self) -> bool:
        return self._supervisor.poll() is None

    def restart(self) -> None:
        self._supervisor.wait()
        self._supervisor = start_local(self.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervisor.poll() is None:
            self._supervisor.request_stop()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._supervisor.wait(STOP_SECONDS if error is None else STOP_SECONDS / 6)
        if self._supervisor.poll() is None:
            self._supervisor.end()


class Drill:
    """Drills a live run; `own` if the drill has started it. `within` limits each drill; None: by the run's times."""

    def __init__(self, run: RunDirectory, *, within: float | None, own: OwnRun | None, show: Show) -> None:
        self.run, self._within, self._own, self._show = run, within, own, show

    def refuse(self, faults: list[DrillFault], *, allow_root: bool) -> None:
        """Raise now if a fault cannot be injected into this run from this machine."""
        processes = self.wait_for_steady_run()
        for fault in faults:
            if fault.rank is not None:
                processes.rank(fault.rank)
            if fault.kind.name == "kill-loader" and fault.rank is not None:
                oldest_loader(processes, fault.rank)
            if fault.kind.name == "cut":
                find_peers(processes, fault.node)
            if fault.kind.destroys and self._own is None:
                raise UserError("S033.checkpoint-damaged-run", where=str(self.run.path), kind=fault.kind.name)
            if fault.kind.name == "fill-disk":
                refuse_shared_disk(self.run.path, allow_root=allow_root)

    def inject(self, fault: DrillFault) -> DrillResult:
        """Wait until the run trains, inject `fault`, observe the run until it has recovered, and return the result."""
        for _ in range(MAX_TRIES):
            try:
                steps = STEADY_STEPS_BEFORE_SLOW if fault.kind.name == "slow" else STEADY_STEPS
                processes = self.wait_for_steady_run(steps)
                observer = RunObserver(self.run)
                starts = [each for each in read_json_lines(self.run.events(0)) if each.get("kind") == "ready"]
                start = max((float(each.get("data", {}).get("seconds") or 0.0) for each in starts), default=0.0)
                # By default the hang deadline, three starts, and the steps in which a slow rank is found.
                hang = self.run.read_recipe().faults.hang_seconds
                within = self._within or BASE_SECONDS + hang + 3 * start + 100 * observer.step_seconds
                everything = [processes.supervisor, *processes.supervisor.children(recursive=True)]
                began = time.time()
                with ExitStack() as stack:
                    observer.restart_clock()
                    stack.enter_context(inject(processes, fault))
                    self._observe(observer, fault, stack, within, everything)
                can_resume = self._own is not None
                result = judge(fault, observer.seen, time=began, can_resume=can_resume, within=within)
                append_line(drills_file(self.run), asdict(result))
                return result
            except psutil.NoSuchProcess:
                continue  # the ranks were started again right before the fault
        raise UserError("S030.run-cannot-drilled", where=str(self.run.path), run=self.run.path)

    def _observe(
        self,
        observer: RunObserver,
        fault: DrillFault,
        stack: ExitStack,
        within: float,
        everything: list[psutil.Process],
    ) -> None:
        seen, can_resume, processes_due, restarted = observer.seen, self._own is not None, 0.0, False
        while observer.seconds < within:
            observer.poll()
            detected, _ = notice_of(fault, seen)
            if fault.kind.lasts and seen.undone is None and detected is not None:
                stack.close()
                seen.undone = observer.seconds
            if is_complete(fault, seen, can_resume=can_resume):
                return
            if observer.seconds >= processes_due:
                processes_due = observer.seconds + SLOW_POLL_SECONDS
                noticed = f"noticed after {detected:.1f} s; recovering" if detected is not None else WAITING
                self._show(f"{fault.title}: {observer.seconds:.0f} s; {noticed}")
                if not restarted and _has_ended(everything[0]) and all(map(_has_ended, everything)):
                    seen.gone, seen.exit_code = observer.seconds, read_attempts(self.run).over
                    if not fault.kind.ends_run:
                        return  # the run should have survived
                    if self._own is not None:
                        observer.poll()
                        self._own.restart()
                        restarted = True
            time.sleep(POLL_SECONDS)

    def _find_processes(self) -> RunProcesses | None:
        try:
            return find_processes(self.run)
        except UserError:
            if self._own is None:
                raise
            if self._own.is_alive():
                return None  # its supervisor does not hold the lease yet
            why = read_attempts(self.run).why or "its supervisor ended"
            raise UserError(
                "S030.run-ended-before", where=str(self.run.path), why=why, agent_log=self.run.agent_log
            ) from None

    def wait_for_steady_run(self, steps: int = STEADY_STEPS) -> RunProcesses:
        """Return the processes once the newest attempt has finished `steps` steps."""
        deadline = time.monotonic() + max(START_SECONDS, self.run.read_recipe().faults.start_seconds)
        reader, highest = RunReader(self.run).follow(self.run.metrics, backlog=METRICS_BACKLOG_BYTES), 0
        while True:
            start_deadline = time.monotonic() + START_SECONDS
            while (processes := self._find_processes()) is None:
                self._show("waiting for the ranks to start")
                _refuse_late(self.run, start_deadline, "its ranks have not started")
                time.sleep(SLOW_POLL_SECONDS)
            highest = max([highest, *(each.get("step", 0) for each in reader.metrics())])
            events = read_json_lines(self.run.events(0))
            ready = [
                each for each in events if each.get("kind") == "ready" and each.get("attempt", 0) == processes.attempt
            ]
            done = highest - (int(ready[-1].get("step", 0)) if ready else highest)
            if done >= steps:
                return processes
            self._show(f"step {highest}; waiting for {steps - done} more steps before the next fault")
            _refuse_late(self.run, deadline, f"it has not finished {steps} steps")
            time.sleep(SLOW_POLL_SECONDS)


def _refuse_late(run: RunDirectory, deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise UserError("S030.run-cannot-drilled-time", where=str(run.path), text=what)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

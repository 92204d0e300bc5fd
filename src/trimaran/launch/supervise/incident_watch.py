"""Incidents that do not end the run: skipped updates, failed saves, a network below plan, a flood of connections."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from trimaran.core import Action, Cause, Incident
from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.runs import DISK_REASONS, IncidentLog, RunDirectory, RunReader

VARIABLE_PARTS = re.compile(r"[\w.,]*\d[\w.,]*( [KMG]?i?B)?")
"""Steps, temporary names and sizes in an error message. They differ each time while the reason is the same."""
ACTIONS = {"skip": "skipped", "rewind": "rewound"}  # `stop` ends the ranks, and becomes an incident there
KEPT = "metrics cannot be written and are kept in memory"


class RankEventIncidents:
    """Files incidents for the events of one attempt. All ranks write the same events; only the first counts.

    `steps_before` is how many steps the run had finished before: those after an older checkpoint are lost.
    """

    def __init__(self, log: IncidentLog, *, attempt: int, steps_before: int = 0) -> None:
        self._log, self._attempt, self._steps_before = log, attempt, steps_before
        self._seen: set[tuple[str, int]] = set()
        self._failures: dict[str, Incident] = {}
        self._failed_saves: dict[str, list[int]] = {}  # steps
        self._flood: Incident | None = None
        self._unwritten = ""  # the reason in `_failures` for which metrics cannot be written

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            kind, step, data = event["kind"], event.get("step", 0), event.get("data", {})
            if kind == "skip" and data.get("action") != "stop" and self._first(kind, step):
                verdict = (data.get("reproduced") or {}).get("verdict")
                what = f"the update of step {step} was not applied: {data.get('reason', 'a value was not finite')}"
                action: Any = ACTIONS.get(data.get("action", "skip"), "skipped")
                evidence = data | {"facts": [verdict]} if verdict else data
                self._file("numeric", what, step, action, evidence, suspects=tuple(data.get("ranks") or ()))
            elif kind == "differ" and data.get("action") != "stop" and self._first(kind, step):
                action = "rewound" if data.get("action") == "rewind" else "continued"
                self._file("numeric", data["message"], step, action, data, suspects=tuple(data["ranks"]))
            elif kind == "checkpoint" and self._first(kind, step):
                self._checkpoint(step, data)
            elif kind == "disk":
                self._disk(step, data)
            elif kind == "connections":
                self._connections(event.get("rank", 0), step, data)
            elif kind == "resume" and data.get("refused") and self._first(kind, step):
                refused = "; ".join(f"step {each['step']} ({each['tier']}): {each['why']}" for each in data["refused"])
                what = f"a checkpoint is damaged and was not used: {refused}"
                incident = self._file("storage", what, step, "continued", {"refused": data["refused"]})
                self._log.amend(incident, cost={"lost_steps": max(0, self._steps_before - step)})

    def _first(self, kind: str, step: int) -> bool:
        is_first = (kind, step) not in self._seen
        self._seen.add((kind, step))
        return is_first

    def _connections(self, rank: int, step: int, data: dict[str, Any]) -> None:
        """File that strangers flood the ports of ranks: one incident with the numbers of each rank."""
        ranks = (self._flood.evidence["ranks"] if self._flood else {}) | {str(rank): data}
        refused = sum(each["refused"] for each in ranks.values())
        fullest = max(ranks.values(), key=lambda each: each["descriptors"] / each["limit"])
        what = (
            f"another program tries to connect to ports of the ranks: {refused:,} packets were refused"
            if refused
            else f"a rank has {fullest['descriptors']:,} of {fullest['limit']:,} file descriptors open"
        )
        if self._flood is None:
            self._flood = self._file("network", what, step, "continued", {"ranks": ranks})
        else:
            self._flood = self._log.amend(self._flood, what=what, evidence={"ranks": ranks})

    def _checkpoint(self, step: int, data: dict[str, Any]) -> None:
        """File failed saves. Repeated failures for one reason are one incident with a count, until a save works."""
        if not data.get("failed"):
            self._failures = {reason: each for reason, each in self._failures.items() if reason == self._unwritten}
            self._failed_saves.clear()
            return
        reason = _reason(data["failed"])
        steps = self._failed_saves.setdefault(reason, [])
        steps.append(step)
        what = f"the checkpoint of step {step} could not be saved: {data['failed']}"
        if again := {"count": len(steps), "last_step": step} if len(steps) > 1 else {}:
            what = f"{len(steps)} checkpoints, of steps {steps[0]} to {step}, could not be saved: {data['failed']}"
        if reason == self._unwritten:
            what = f"{what}; {KEPT}"
        if (known := self._failures.get(reason)) is None:
            self._failures[reason] = self._file("storage", what, step, "continued", data)
        else:
            evidence = known.evidence | (again or data)
            self._failures[reason] = self._log.amend(known, what=what, evidence=evidence)

    def _disk(self, step: int, data: dict[str, Any]) -> None:
        """File that metrics cannot be written, or amend the incident once they are written again or lost."""
        failed, lost = data.get("failed", ""), ""
        if data.get("lost"):
            first, last = data["first_lost"], data["last_lost"]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            lost = f"the metrics of {steps} were lost"
        known = self._failures.get(_reason(failed) if failed else self._unwritten)
        if failed and not lost:
            self._unwritten = _reason(failed)
            what = f"{known.what}; {KEPT}" if known else f"{KEPT}: {failed}"
        else:
            self._failures.pop(self._unwritten, None)
            self._unwritten = ""
            what = lost or "the metrics are complete again"
            if known is not None:
                what = f"{known.what.replace(KEPT, 'metrics could not be written for a while')}; {what}"
        if known is None:
            known = self._file("storage", what, step, "continued", data)
        else:
            known = self._log.amend(known, what=what, evidence=known.evidence | data)
        if self._unwritten:
            self._failures[self._unwritten] = known

    def _file(
        self,
        cause: Cause,
        what: str,
        step: int,
        action: Action,
        evidence: dict[str, Any],
        *,
        suspects: tuple[int, ...] = (),
    ) -> Incident:
        incident = self._log.notice(cause, what, attempt=self._attempt, step=step, suspects=suspects, evidence=evidence)
        return self._log.amend(incident, action=action)


def _reason(failed: str) -> str:
    """Return why something was not written, without what differs each time: one full disk is one incident."""
    on_disk = (each for each in DISK_REASONS if each in failed)
    return next(on_disk, VARIABLE_PARTS.sub("", failed))


NUM_STEPS = 5  # in a row; their median counts
MIN_FACTOR = 10.0  # of the predicted time
MIN_EXCESS_SECONDS = 0.2  # per step above the predicted time
MIN_STEP_FRACTION = 0.5  # of the step that communication takes


def is_below_plan(comm: Sequence[float], steps: Sequence[float], *, expected: float) -> bool:
    """Return whether communication takes far longer than `expected`. All in seconds per step."""
    if len(comm) < NUM_STEPS:
        return False
    usual = median(comm)
    is_slower = usual > MIN_FACTOR * expected and usual > expected + MIN_EXCESS_SECONDS
    return is_slower and usual > MIN_STEP_FRACTION * median(steps)


class NetworkCheck:
    """Reads the step metrics of one attempt on several nodes, and files one incident if the network is below plan."""

    def __init__(self, run: RunDirectory, log: IncidentLog, watch: AttemptWatch) -> None:
        self._run, self._log, self._watch = run, log, watch
        self._reader = RunReader(run).follow(run.metrics, backlog=0)
        self._comm: deque[float] = deque(maxlen=NUM_STEPS)
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._num_changes = 0
        self._read_plan()
        self._done = len(watch.nodes) < 2 or run.read_plan().prediction is None

    def _read_plan(self) -> None:
        """Start over with the prediction of the run's plan."""
        prediction = self._run.read_plan().prediction
        self._expected = prediction.time.get("comm", 0.0) if prediction else 0.0
        self._comm.clear()
        self._steps.clear()

    def poll(self) -> None:
        if self._done:
            return
        if len(changes := self._watch.of_kind("change")) > self._num_changes:
            self._num_changes = len(changes)
            self._read_plan()
        for step in self._reader.metrics():
            self._comm.append(step["phases"].get("comm", 0.0))
            self._steps.append(step["step_seconds"])
        if is_below_plan(self._comm, self._steps, expected=self._expected):
            self._done = True
            self._log.notice(
                "network",
                f"the network is below plan: communication takes {median(self._comm):.2g} s per step, "
                f"{self._expected:.2g} s were predicted",
                attempt=self._watch.spec.attempt,
                step=self._watch.highest_step,
                action="continued",
                evidence={"comm_seconds": median(self._comm), "expected_seconds": self._expected},
            )


MIN_REFUSED, MIN_REFUSED_PER_RANK = 100, 10  # ranks that connect all at once may be refused a few times too


class StrangerCheck:
    """Files one incident for an attempt if more than a few connections were refused during it."""

    def __init__(self, log: IncidentLog, watch: AttemptWatch, count_refused: Callable[[], int]) -> None:
        self._log, self._watch, self._count_refused = log, watch, count_refused
        self._before, self._done = count_refused(), False
        self._min_refused = max(MIN_REFUSED, MIN_REFUSED_PER_RANK * watch.spec.world_size)

    def poll(self) -> None:
        if self._done or (refused := self._count_refused() - self._before) < self._min_refused:
            return
        self._done = True
        self._log.notice(
            "network",
            f"another program connects to the supervisor's port without the run's token: {refused:,} connections "
            "were refused",
            attempt=self._watch.spec.attempt,
            step=self._watch.highest_step,
            action="continued",
            evidence={"refused": refused},
        )

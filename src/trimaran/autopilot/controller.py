"""The autopilot of one run: follows its files, asks the policy, requests changes, and records what became of them.

It only reads and writes files of the run directory. The ranks answer its requests with `change` events.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimaran.autopilot.decision_loop import ChangeAnswer, DecisionLoop, Output, PendingRequest, RunSettings
from trimaran.autopilot.policy import GROWING_MEMORY_FRACTION, Patch, Proposal, fits, settings_of
from trimaran.autopilot.propose_changes import (
    best_layout,
    proposals_of,
    rows_by_speed,
    with_recovered_node,
    without_slow_node,
)
from trimaran.autopilot.trial import TimedStep
from trimaran.core import Decision, UserError, open_regular_fd
from trimaran.doctor import Evidence, diagnose, read_evidence, usable_bytes
from trimaran.doctor.predicted_gain import can_measure_links, with_measured_links
from trimaran.doctor.step_breakdown import get_number, step_breakdown
from trimaran.machine import Link
from trimaran.runs import RunDirectory, RunReader
from trimaran.runs.line_files import LineWriter
from trimaran.runs.node_records import LEFT_OUT_FIELD, has_recovered, read_left_out, read_node_speeds, write_left_out
from trimaran.runs.run_records import read_decisions
from trimaran.runs.run_requests import read_change_request, write_change_request

log = logging.getLogger(__name__)


class DecisionLedger:
    """Writes the decisions of a run. Only one process may use it: the one that holds the autopilot's lock."""

    def __init__(self, run: RunDirectory) -> None:
        self._writer = LineWriter(run.decisions, reserve=run.reserve)

    def write(self, decision: Decision) -> None:
        self._writer.write(decision.as_dict())
        self._writer.close()  # decisions are minutes apart


POLL_SECONDS = 1.0
BACKLOG_BYTES = 2 << 20  # of metrics and of events that a controller reads when it starts
ANSWER_SECONDS = 900.0  # after which a request that the ranks do not answer is withdrawn
LOST_POLLS = 5  # polls without an answer after the request's file is gone
# Of a core, for diagnoses. An advising autopilot must not disturb the run; one that acts pays for itself.
MAX_CPU_FRACTION = {"advise": 0.001, "act": 0.02}
FIRST_DIAGNOSIS_SECONDS = {"off": 0.0, "advise": 60.0, "act": 0.0}
OPEN_ACTIONS = ("restarted", "replanned", "resized", "rewound")  # of incidents whose cost is known once they are over


class Controller:
    """The autopilot of one run, from its first step to its last. `poll` reads what is new and acts on it."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        calibrations: Path | None = None,
        search_layout: Callable[[Evidence], Patch] = best_layout,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self._calibrations, self._search_layout, self._clock = run, calibrations, search_layout, clock
        self.recipe, self.plan = run.read_recipe(), run.read_plan()
        self.loop = DecisionLoop(self.recipe.autopilot, read_decisions(run))
        self._ledger = DecisionLedger(run)
        self._reader = RunReader(run).follow(run.metrics, run.events(0), backlog=BACKLOG_BYTES)
        self._memory_limit: float | None = None
        self._requested_at, self._lost_polls = 0.0, 0
        # A short run is over before advice pays; one that may act is diagnosed as soon as it has enough steps.
        self._diagnose_due = self._clock() + FIRST_DIAGNOSIS_SECONDS[self.recipe.autopilot.mode]
        self._layouts: dict[str, Patch] = {}  # the patch to the best layout, by plan: searched once for each
        self._links: tuple[Link, ...] | None = None  # as they were last measured
        self._speeds_version, self._recovered = 0, set[str]()  # hosts that are left out and fast again
        self._waits_for_nodes = False  # the ranks start again because we asked for it
        self._settings_version: tuple[tuple[int, int], ...] = ()
        self._known_settings: dict[str, Any] = {}
        self._read(first=True)
        # Go on with the trial of an earlier controller of this run.
        if (trial := self.loop.trial) is not None:
            request, pending = read_change_request(self.run), None
            if request is not None and request.by == "autopilot" and request.id == trial.request:
                pending = PendingRequest(id=request.id, patch=dict(request.patch), reason=request.reason)
                self._requested_at = self._clock()
            self.loop.resume_trial(pending)

    def poll(self) -> None:
        """Read what is new, and write decisions and a request if there are any."""
        self._read(first=False)
        loop = self.loop
        if self.run.autopilot_off.exists():
            loop.take_back_trial("the autopilot was switched off")
            self._write(loop.take_output())
            return
        if loop.pending is not None:
            # Give up a request that was replaced, lost, or not answered for long.
            found = read_change_request(self.run)
            if _is_about_nodes(loop.pending):
                if self._clock() - self._requested_at > ANSWER_SECONDS:
                    self.loop.abandon_request(f"the ranks were not started on other nodes for {ANSWER_SECONDS:.0f} s")
            elif found is None or found.id != loop.pending.id:
                self._lost_polls += 1
                if self._lost_polls >= LOST_POLLS:
                    self.loop.abandon_request("the ranks did not answer the request")
            elif self._clock() - self._requested_at > ANSWER_SECONDS:
                self.run.change_request.unlink(missing_ok=True)
                self.loop.abandon_request(f"the ranks did not answer for {ANSWER_SECONDS:.0f} s")
        pending = read_change_request(self.run) if self.run.change_request.exists() else None
        has_open_incident = any(
            each.action is None or (each.action in OPEN_ACTIONS and "seconds_to_recover" not in each.cost)
            for each in self._reader.incidents()[-1:]
        )
        if has_open_incident or (pending is not None and pending.by == "user"):
            self._write(loop.take_output())
            return
        try:
            version = self.run.node_speeds.stat().st_mtime_ns
        except OSError:
            version = self._speeds_version
        if version != self._speeds_version:
            self._speeds_version, before = version, self._recovered
            self._recovered = {host for host, each in read_node_speeds(self.run).items() if has_recovered(each)}
            if self._recovered - before:
                self.loop.due, self._diagnose_due = min(self.loop.due, self.loop.step), self._clock()
        if (shift := loop.find_shift()) is not None:
            log.info("%s", shift)
            self._layouts, self._links, self._diagnose_due = {}, None, self._clock()
        if loop.trial is None and (not loop.is_due() or self._clock() < self._diagnose_due):
            self._write(loop.take_output())
            return
        steps, limit = self.recipe.train.steps, self._memory_limit
        facts = RunSettings(total_steps=steps, settings=self.settings(), memory_limit=limit)
        self._write(loop.poll(facts, now=time.time(), propose=self.propose))

    # Reading

    def _read(self, *, first: bool) -> None:
        restarted = self._reader.read_attempts()
        for line in self._reader.metrics():
            if (sample := read_sample(line)) is not None:
                self.loop.add_step(sample)
                if get_number(line, "memory", "reserved") is not None:  # only the CUDA allocator reports it
                    self._memory_limit = get_number(line, "memory", "total") or self._memory_limit
        for event in self._reader.events():
            kind, step, pending = event.get("kind"), int(event.get("step") or 0), self.loop.pending
            if kind == "change":
                if (answer := read_answer(event)) is not None:
                    self.loop.add_answer(answer)
                continue
            self.loop.marks.add(event)
            if kind == "ready" and pending is not None and _is_about_nodes(pending):
                # The ranks were started again on other nodes.
                took = self._clock() - self._requested_at
                known = ChangeAnswer(
                    id=pending.id, step=step, status="applied", patch=pending.patch, pause_seconds=took
                )
                self.loop.add_answer(known)
        if restarted and not first:
            self._links = None  # the number of ranks may be another
            if not self._waits_for_nodes:
                self.loop.restarted(self.loop.step)
        self._waits_for_nodes = _is_about_nodes(self.loop.pending)

    def settings(self) -> dict[str, Any]:
        """Return the present values of the fields that can change; the ranks replace both files after a change."""
        version = tuple((each.st_ino, each.st_mtime_ns) for each in (self.run.recipe.stat(), self.run.plan.stat()))
        if version != self._settings_version:
            self.recipe, self.plan = self.run.read_recipe(), self.run.read_plan()
            self._known_settings, self._settings_version = settings_of(self.plan, self.recipe), version
        return self._known_settings | {LEFT_OUT_FIELD: sorted(read_left_out(self.run))}

    # Acting

    def propose(self) -> Sequence[Proposal]:
        """Diagnose the steps under the present plan. Expensive, so it is not done again for a while."""
        began = time.thread_time()
        evidence = read_evidence(self.run, calibrations=self._calibrations)
        first = min((each.step for each in self.loop.baseline_steps()), default=0)
        evidence = replace(evidence, steps=tuple(each for each in evidence.steps if each["step"] >= first))
        limit, peak = self._memory_limit, max((each.get("peak_bytes") or 0 for each in evidence.steps), default=0)
        if limit is not None:  # other processes may hold a part of the device
            limit = min(limit, usable_bytes(evidence) or limit)
        is_near = limit is not None and peak > GROWING_MEMORY_FRACTION * limit
        key, priced = self.plan.model_dump_json(), self._with_measured_links(evidence)
        if key not in self._layouts:
            self._layouts[key] = self._search_layout(priced)
        found = proposals_of(priced, diagnose(evidence), peak_is_near=is_near, layout=self._layouts[key])
        found = [each for each in found if each.patch.get("plan.micro_batches") != "measured"]  # at a start only
        settings = self.settings()
        rows = rows_by_speed(evidence, settings)
        found += [*rows, *without_slow_node(evidence, settings, instead=rows)]
        decisions, speeds = [*self.loop.decisions.values()], read_node_speeds(self.run)
        found += with_recovered_node(evidence, settings, decisions=decisions, speeds=speeds)
        if limit is not None:
            found = [each for each in found if fits(each, peak, limit)]
        took = time.thread_time() - began
        mode = self.recipe.autopilot.mode
        if mode in MAX_CPU_FRACTION and self.loop.trial is None:
            self._diagnose_due = self._clock() + took / MAX_CPU_FRACTION[mode]
        return found

    def _with_measured_links(self, evidence: Evidence) -> Evidence:
        """Return the evidence with links as slow as they were measured, under this plan or an earlier one."""
        question, measured = evidence.planner_inputs(), step_breakdown(evidence)
        if question is None or measured is None:
            return evidence
        if can_measure_links(evidence.plan):
            question = with_measured_links(question, evidence.plan, measured)
            self._links = question.cluster.links
        elif self._links is not None:
            question = replace(question, cluster=replace(question.cluster, links=self._links))
        return replace(evidence, planner_inputs=lambda: question)

    def _write(self, output: Output) -> None:
        """Write the decisions, and pass the request on to the ranks, or to the supervisor if it is about nodes."""
        for decision in output.decisions:
            self._ledger.write(decision)
            log.info("decision %d: %s: %s", decision.id, decision.outcome, decision.reason)
            if LEFT_OUT_FIELD in decision.patch and decision.outcome in ("rolled-back", "failed"):
                write_left_out(self.run, decision.undo[LEFT_OUT_FIELD])
        pending = output.request
        if pending is None:
            return
        self._requested_at, self._lost_polls = self._clock(), 0
        if _is_about_nodes(pending):
            write_left_out(self.run, pending.patch[LEFT_OUT_FIELD], reason=pending.reason)
            self._waits_for_nodes = True
            return
        try:
            request = write_change_request(self.run, pending.patch, by="autopilot", reason=pending.reason)
        except UserError as error:
            log.warning("the change cannot be requested: %s", error.what)
            self.loop.abandon_request("a person asked for another change")
            self._write(self.loop.take_output())
            return
        if self.loop.pending is not None:
            self.loop.pending = replace(self.loop.pending, id=request.id)


def _is_about_nodes(pending: PendingRequest | None) -> bool:
    """Return whether the supervisor answers a request, by a start of the ranks, and not the ranks themselves."""
    return pending is not None and LEFT_OUT_FIELD in pending.patch


def read_sample(line: Mapping[str, Any]) -> TimedStep | None:
    """Return the step of a line of the metrics; None if it has no time."""

    def number(*path: str) -> float:
        return get_number(dict(line), *path) or 0.0

    step, seconds, checkpoint = line.get("step"), number("step_seconds"), number("phases", "checkpoint")
    if not isinstance(step, int) or not seconds or seconds <= checkpoint + number("phases", "data"):
        return None
    peak = max(number("ranks", "peak_bytes", "max"), number("peak_bytes"))
    return TimedStep(step, seconds - checkpoint, seconds, peak_bytes=peak, time=number("time"))


def read_answer(event: Mapping[str, Any]) -> ChangeAnswer | None:
    """Return the answer in a `change` event; None if it is damaged."""
    data = event.get("data")
    if not isinstance(data, dict) or data.get("status") not in ("applied", "refused", "failed"):
        return None
    number, patch, error = data.get("id"), data.get("patch"), data.get("error")
    if not isinstance(number, int) or not isinstance(patch, dict):
        return None
    return ChangeAnswer(
        id=number,
        step=int(event.get("step") or 0),
        status=data["status"],
        patch=patch,
        by="user" if data.get("by") == "user" else "autopilot",
        in_place=data.get("how") == "in place",
        pause_seconds=get_number(data, "pause_seconds") or 0.0,
        error=str(error.get("what") or "") if isinstance(error, dict) else "",
    )


@contextmanager
def only_controller(run: RunDirectory) -> Iterator[bool]:
    """Yield whether this process is the only autopilot of the run; it stays so until the end."""
    fd, is_only = open_regular_fd(run.path / "autopilot.lock", os.O_CREAT | os.O_RDWR, mode=0o600), True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_only = not isinstance(error, BlockingIOError)  # any other: a network disk without locks
    try:
        yield is_only
    finally:
        os.close(fd)


def control(run: RunDirectory, stop: threading.Event, *, calibrations: Path | None = None) -> None:
    """Run the autopilot of a run until `stop` is set. It never raises: a run works without its autopilot."""
    try:
        if run.read_recipe().autopilot.mode == "off":
            return
        while not stop.is_set():
            with only_controller(run) as is_only:
                if is_only:
                    controller = Controller(run, calibrations=calibrations)
                    while not stop.wait(POLL_SECONDS):
                        # The recipe or the plan may be being replaced.
                        with contextlib.suppress(UserError, FileNotFoundError):
                            controller.poll()
            stop.wait(10 * POLL_SECONDS)  # another controller may end before the run does
    except Exception:
        log.exception("the autopilot has ended; the run continues without it")

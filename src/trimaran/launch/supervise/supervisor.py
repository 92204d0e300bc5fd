"""The loop over attempts: start the ranks, watch them, investigate faults, and restart or stop."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trimaran.core import EXIT_AGAIN, EXIT_DONE, Cause
from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.launch.supervise.elastic_watch import ElasticWatch
from trimaran.launch.supervise.incident_watch import NetworkCheck, RankEventIncidents, StrangerCheck
from trimaran.launch.supervise.intent import (
    AllStopped,
    Continue,
    HandOver,
    Intent,
    IntentFacts,
    NodeChanges,
    Resize,
    Restart,
    Stop,
    StopRequests,
    next_intent,
)
from trimaran.launch.supervise.investigate import OpenIncident, headline, investigate, note_lost_nodes
from trimaran.launch.supervise.next_attempt import (
    GrowthPlanner,
    allocator_after_ooms,
    apply_decision,
    fit_plan,
    read_resize_request,
    recovery_options,
)
from trimaran.launch.supervise.node import AttemptSpec, Node, NodeGroup, on_all_nodes
from trimaran.launch.supervise.rank_report import show_ranks
from trimaran.launch.supervise.recovery_policy import EXIT_FAULT, Cycle, PolicyDecision, decide
from trimaran.launch.supervise.slow_rank_check import SlowRankCheck
from trimaran.runs import IncidentLog, Journal, RunDirectory, last_step, read_json_lines
from trimaran.runs.held_directory import HeldDirectory
from trimaran.runs.node_records import read_left_out
from trimaran.runs.reserve import fill_reserve, remove_reserve
from trimaran.runs.run_records import AttemptLog, AttemptOutcome, read_attempts

log = logging.getLogger(__name__)

DIRECTORY_SECONDS = 1.0  # between looks at the run directory

EVENT_BACKLOG_BYTES = 1 << 20  # the last events of a long run are enough
MAX_COSTS = ("max_lost_steps", "max_lost_seconds")

POLL_SECONDS, PAUSE_PER_POLL = 0.05, 4.0
LEASE_SECONDS = 1.0  # between checks of the lease
LONG_WAIT_SECONDS = 1.0  # a longer wait for nodes is recorded with the incident

SupervisorOutcome = AttemptOutcome | Literal["killed", "fenced", "deleted"]


def file_lost_supervisor(run: RunDirectory) -> OpenIncident | None:
    """File an incident if the previous supervisor was killed, which never wrote that it was over; None if not."""
    known = read_attempts(run)
    if not known.attempts or known.over is not None:
        return None
    last, step = known.attempts[-1], last_step(run)
    what = f"the previous supervisor was killed (process {last.pid} on {last.host})"
    events = read_json_lines(run.events(0), backlog=EVENT_BACKLOG_BYTES)
    bounds = [each.get("data", {}) for each in events if each.get("kind") == "loss_bound"]
    found = {f"max_lost_{name}": bounds[-1].get(f"node_{name}") for name in ("steps", "seconds")} if bounds else {}
    cost = {key: each for key, each in found.items() if each is not None}
    incident = IncidentLog(run).notice("host", what, attempt=last.number, step=step, action="restarted", cost=cost)
    return OpenIncident(incident=incident, since=time.monotonic(), highest_step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorEnd:
    """How a supervisor ended."""

    code: int  # 0 done, 2, 75, 93, 128 + a signal, or another for a fault
    handed_over: bool = False  # only this node stopped; the run goes on, and another node has to coordinate it


class Supervisor:
    """Supervises a run to its end, through any number of attempts.

    `highest_step` is the highest step that the run had finished before. `open_incident`: another supervisor or
    coordinator was lost, and this one takes over. `held`: the run directory; None if files are opened by path, and
    moves go unnoticed.
    """

    def __init__(
        self,
        run: RunDirectory,
        nodes: NodeGroup,
        signals: Signals,
        *,
        highest_step: int = 0,
        open_incident: OpenIncident | None = None,
        held: HeldDirectory | None = None,
    ) -> None:
        self.run, self.node_group, self.signals = run, nodes, signals
        self.recipe = run.read_recipe()
        self.incidents, self.attempts = IncidentLog(run), AttemptLog(run)
        self._held, self._directory_due = held, 0.0
        self.history: list[Cycle] = []
        self._highest_step = highest_step
        self._open_incidents: list[OpenIncident] = [open_incident] if open_incident else []
        self._intent: Intent = Continue()
        self._stop_incident: OpenIncident | None = None  # that of the intent `Stop`
        self._growth = GrowthPlanner(run, nodes.growth)
        self._lease_due = 0.0

    def supervise(self) -> SupervisorEnd:
        """Return when the run is over, or is handed over to another node."""
        self.run.stop_request.unlink(missing_ok=True)
        self._poll_directory()
        if self.signals.stop_requested and not self._open_incidents:
            return self._over(EXIT_AGAIN, f"stopped by {self.signals.name} before anything was started")
        while True:
            began = time.monotonic()
            nodes = self.node_group.wait_for_nodes()
            if self._open_incidents and time.monotonic() > began + LONG_WAIT_SECONDS:
                last = self._open_incidents[-1]
                last.incident = self.incidents.amend(last.incident, action="waited")
            if nodes is None:
                # End the run, because a stop is requested or too few nodes are present.
                if not self.signals.stop_requested:
                    return self._over(EXIT_AGAIN, "too few nodes")
                for each in self._open_incidents:
                    if each.incident.cause == "preempted":  # the others were asked first
                        self.incidents.amend(each.incident, action="saved")
                return self._over(EXIT_AGAIN, "asked to stop")
            # Fit the plan to the nodes that are present, and record if the run gets smaller.
            size, requested = self.run.read_plan().mesh.world_size, self._growth.size_at_start(nodes)
            if isinstance(self._intent, Resize):
                requested = self._intent.size
            self._intent = next_intent(self._intent, Restart())
            error = fit_plan(self.run, nodes, world_size=requested)
            new = self.run.read_plan().mesh.world_size
            if new < size and requested is None:
                why = f"{size} ranks before, {new} now: the nodes hold no more"
                if not self._open_incidents:
                    self.incidents.notice("host", "nodes are missing", action="resized", evidence={"why": why})
                for each in self._open_incidents[-1:]:
                    evidence = each.incident.evidence | {"why": why}
                    each.incident = self.incidents.amend(each.incident, action="resized", evidence=evidence)
            if error:
                return self._over(EXIT_FAULT, error)
            end = self._attempt(nodes)
            if end is not None:
                return end

    def _attempt(self, nodes: Sequence[Node]) -> SupervisorEnd | None:
        """Start the ranks and supervise them to their end. Returns None if they are to start again."""
        plan, before = self.run.read_plan(), self._highest_step
        number = self.attempts.begin(world_size=plan.mesh.world_size)
        log.info("start %d: %s on %s", number + 1, plan, ", ".join(node.name for node in nodes))
        spec = AttemptSpec(
            attempt=number,
            first_rank=0,
            num_ranks=plan.mesh.world_size,
            world_size=plan.mesh.world_size,
            store=self.node_group.store,
            token=self.node_group.token,
            environment={**self.node_group.environment(plan), **allocator_after_ooms(self.run)},
        )
        if plan.is_elastic:
            watch: AttemptWatch = ElasticWatch(
                self.run,
                nodes,
                spec,
                num_replicas=plan.mesh.dp_replicate,
                restart=self.recipe.faults.restart,
                incidents=self.incidents,
                group=self.node_group,
            )
        else:
            watch = AttemptWatch(self.run, nodes, spec)
        outcome = self._watch(watch)
        investigation = None
        is_closing = watch.is_saved and not watch.not_done() and len(watch.of_kind("done")) == plan.mesh.world_size
        if outcome == "trouble" and is_closing:
            log.warning("the run is done, but not all ranks could close; they are killed")
            outcome = "done"
        if outcome == "trouble":
            investigation = investigate(self.run, watch, self.incidents, step=watch.highest_step)
            if self._stop_incident is None:  # a node that leaves while the run stops was asked to
                note_lost_nodes(self.run, nodes, watch.lost, incident=investigation.incident.id)
        on_all_nodes(watch.nodes, lambda node: node.kill())
        if outcome == "fenced":
            return SupervisorEnd(code=EXIT_FAULT)  # another process holds the lease: this one must not write any more
        if outcome == "deleted" and self._held is not None:
            raise self._held.lost_error()
        self.node_group.channel.end_attempt(number)
        self._settle(watch, is_over=outcome in ("done", "stopped") or watch.is_saved)
        if watch.is_saved:
            self.attempts.end("done", step=watch.highest_step)
            return self._finish(watch, investigation)
        self.attempts.end(outcome if outcome in ("done", "stopped") else "trouble", step=watch.highest_step)
        if investigation is not None:
            return self._recover(investigation, new_steps=self._highest_step - before)
        if outcome == "killed":
            self._amend_stop(action="stopped", step=watch.highest_step)
            return self._over(self.signals.exit_code, f"ended at once by {self.signals.name}")
        return self._over(EXIT_DONE, "all steps are done") if outcome == "done" else self._stopped(watch)

    def _finish(self, watch: AttemptWatch, investigation: OpenIncident | None) -> SupervisorEnd:
        """End a run whose training is done and saved. The code is 0, whatever happened to its ranks after that."""
        why = "all steps are done and saved"
        left, step = watch.not_done(), watch.highest_step
        reason = "it was ended at once" if self.signals.kill_requested else "a rank ended"
        if investigation is not None:
            evidence = investigation.incident.evidence | {"why": f"{why}; not done: {', '.join(left) or 'nothing'}"}
            incident = self.incidents.amend(investigation.incident, action="finished", evidence=evidence)
            log.warning("%s: %s", headline(incident), evidence["why"])
            reason = incident.what
        self._amend_stop(action="finished", step=step)
        if left:
            with Journal(self.run, 0, attempt=watch.spec.attempt) as journal:  # the ranks are gone
                for kind in left:
                    journal.event("unfinished", step=step, what=kind, why=reason)
        unfinished = [event for event in watch.of_kind("unfinished") if event["rank"] in watch.lead_ranks]
        skipped = [*left, *(event["data"].get("what") for event in unfinished)]
        return self._over(EXIT_DONE, f"{why}; not done: {', '.join(skipped)}" if skipped else "all steps are done")

    def _watch(self, watch: AttemptWatch) -> SupervisorOutcome:
        """Poll until the attempt is over or in trouble; the ranks that are left are still alive then."""
        # Steps that an open incident cost are counted with it.
        steps_before = 0 if self._open_incidents else self._highest_step
        reported = RankEventIncidents(self.incidents, attempt=watch.spec.attempt, steps_before=steps_before)
        network, slow_ranks = NetworkCheck(self.run, self.incidents, watch), SlowRankCheck(self.run, self.incidents)
        strangers = StrangerCheck(self.incidents, watch, lambda: self.node_group.channel.num_refused)
        num_read, began = 0, time.monotonic()
        while (outcome := watch.poll()) is None:
            network.poll()
            strangers.poll()
            slow_ranks.poll(watch)
            reported.add(watch.events[num_read:])
            num_read = len(watch.events)
            self._settle(watch)
            self._poll_directory()
            if self._held is not None and self._held.place == "deleted":
                return "deleted"
            if time.monotonic() >= self._lease_due:
                self._lease_due = time.monotonic() + LEASE_SECONDS
                if not self.node_group.lease.holds():
                    return "fenced"
            if self.signals.kill_requested:
                return "killed"
            # Ask the ranks to stop if a stop or another number of ranks was requested; a resize is a stop and a start.
            before = self._intent
            has_file = self.run.stop_request.exists()
            self._note_facts(StopRequests(moved=self._moved, signal=self.signals.name, stop_file=has_file), watch)
            if isinstance(self._intent, Continue):
                leaving, size = self.node_group.leaving(watch.nodes), None
                if isinstance(watch, ElasticWatch):
                    leaving = watch.let_leave(leaving)  # elastic replicas come and go within the attempt
                elif not leaving:
                    size = read_resize_request(self.run, watch.nodes) or self._growth.size_with_joined(watch.nodes)
                self._note_facts(NodeChanges(leaving=tuple(leaving), size=size), watch)
            if isinstance(before, Continue) and not isinstance(self._intent, Continue):
                for node in watch.nodes:
                    node.request_stop()
            if self.signals.show_requested:
                self.signals.show_requested = False
                show_ranks(self.run, watch.nodes, range(watch.spec.world_size))
            # With thousands of ranks a poll takes longer, and must leave most of a core to the channel.
            time.sleep(max(POLL_SECONDS, PAUSE_PER_POLL * (time.monotonic() - began)))
            began = time.monotonic()
        reported.add(watch.events[num_read:])
        return outcome

    def _poll_directory(self) -> None:
        """Write lines that could not be written before, and take the reserve back, if there is room again."""
        if time.monotonic() >= self._directory_due:
            self._directory_due = time.monotonic() + DIRECTORY_SECONDS
            if self._held is None or self._held.place != "deleted":
                self.incidents.flush()
                self.attempts.flush()
                fill_reserve(self.run.reserve)

    @property
    def _moved(self) -> str:
        """What happened to the run directory if it was moved; empty if it was not."""
        return self._held.explain("moved") if self._held is not None and self._held.place == "moved" else ""

    def _note_facts(self, facts: IntentFacts, watch: AttemptWatch) -> None:
        """Update the intent, and file an incident if it is to stop now."""
        self._intent = next_intent(self._intent, facts)
        if isinstance(self._intent, Stop) and self._stop_incident is None:
            cause, what, step = self._intent.cause, self._intent.what, watch.highest_step
            if cause == "storage":
                log.error("%s; stopping with a checkpoint there", what)
            incident = self.incidents.notice(cause, what, attempt=watch.spec.attempt, step=step)
            self._stop_incident = OpenIncident(incident=incident, since=time.monotonic(), highest_step=step)

    def _amend_stop(self, **changes: Any) -> None:
        if self._stop_incident is not None:
            self.incidents.amend(self._stop_incident.incident, **changes)

    def _settle(self, watch: AttemptWatch, *, is_over: bool = False) -> None:
        """Write the cost of open incidents once the run is past their step, or has ended well."""
        self._highest_step = max(self._highest_step, watch.highest_step)
        settled = [each for each in self._open_incidents if is_over or watch.highest_step > each.highest_step]
        for each in settled:
            resumed_at = min((event["step"] for event in watch.of_kind("ready")), default=each.highest_step)
            cost = {
                "seconds_to_recover": round(time.monotonic() - each.since, 3),
                "lost_steps": max(0, each.highest_step - resumed_at),
            }
            self.incidents.amend(each.incident, cost=each.incident.cost | cost)
            self._open_incidents.remove(each)

    def _recover(self, investigation: OpenIncident, *, new_steps: int) -> SupervisorEnd | None:
        """Do what the policy decides about an incident. Returns None if the ranks are to start again."""
        incident = investigation.incident
        cycle = Cycle(incident=incident, new_steps=new_steps)
        options = recovery_options(self.run, self.recipe)
        decision = decide([*self.history, cycle], self.recipe.faults, options)
        if incident.cause == "oom" and self.recipe.faults.restart and self.run.change_request.exists():
            # A plan that was being tried ran out of memory. The run still has the one before; its ranks drop the other.
            decision = PolicyDecision(action="restarted", why="with the plan before the change that was being made")
        # Steps that an open incident cost are lost to this one too, and no state is discarded before it is copied.
        bounds = [each.incident.cost for each in self._open_incidents]
        cost = {key: max(each.get(key, 0.0) for each in (incident.cost, *bounds)) for key in MAX_COSTS}
        allocator = {"allocator": decision.allocator} if decision.allocator else {}  # for the next attempts
        incident = self.incidents.amend(
            incident,
            action=decision.action,
            evidence=incident.evidence | {"why": decision.why} | allocator,
            cost=incident.cost | {key: each for key, each in cost.items() if each},
        )
        log.warning("%s: %s; %s", headline(incident), decision.action, decision.why)
        self.history.append(Cycle(incident=incident, new_steps=new_steps))
        if decision.action == "stopped":
            return self._over(decision.code, f"{incident.what}; {decision.why}")
        self._open_incidents.append(replace(investigation, incident=incident, highest_step=self._highest_step))
        apply_decision(self.run, self.recipe, decision, incident)
        self._intent = next_intent(self._intent, Restart())
        if isinstance(self._intent, Continue):
            self.run.stop_request.unlink(missing_ok=True)  # ours, for a resize that the incident interrupted
        return None

    def _stopped(self, watch: AttemptWatch) -> SupervisorEnd | None:
        """Handle that all ranks stopped with a complete checkpoint. Returns None if they are to start again."""
        stopped_at, leaving = time.monotonic(), tuple(self.node_group.leaving(watch.nodes))
        is_own = isinstance(self._intent, Stop) and self._intent.is_own
        facts = AllStopped(
            leaving=leaving,
            enough_stay=self.node_group.can_go_on(),
            can_hand_over=is_own and self.node_group.can_hand_over(),  # which takes seconds
        )
        self._note_facts(facts, watch)
        if isinstance(self._intent, Stop | HandOver):
            assert self._stop_incident is not None, "the intent says that it was filed"
            incident, step = self._stop_incident.incident, watch.highest_step
            seconds = max(0.0, stopped_at - self._stop_incident.since)
            cost = {"seconds_to_stop": round(seconds, 3), "lost_steps": 0.0}
            if isinstance(self._intent, HandOver):
                why = "only the node that coordinates was asked to stop; the others continue"
                log.warning("%s", why)
                evidence = incident.evidence | {"why": why}
                self.incidents.amend(incident, action="continued", step=step, cost=cost, evidence=evidence)
                return SupervisorEnd(code=EXIT_AGAIN, handed_over=True)
            self.incidents.amend(incident, action="saved", step=step, cost=cost)
            moved = f"{self._moved}; " if self._moved else ""
            how = "with a complete checkpoint; `trimaran resume` continues"
            if self.recipe.checkpoint.is_off:
                how = "without a checkpoint (checkpoint.every: off); `trimaran resume` starts from the first step"
            return self._over(EXIT_AGAIN, f"{moved}stopped {how}")
        if leaving:
            # File an incident: the run goes on without these nodes.
            was_asked = any(getattr(node, "leaving", False) for node in watch.nodes)
            is_slow = bool(read_left_out(self.run)) and not was_asked
            why, step = "left out" if is_slow else "asked to stop", watch.highest_step
            what = f"{', '.join(leaving)}: {why}; the other nodes continue"
            cause: Cause = "straggler" if is_slow else "preempted"
            incident = self.incidents.notice(cause, what, action="continued", attempt=watch.spec.attempt, step=step)
            log.warning("%s", headline(incident))
            self._open_incidents.append(OpenIncident(incident=incident, since=time.monotonic(), highest_step=step))
        self.run.resize_request.unlink(missing_ok=True)
        self.run.stop_request.unlink(missing_ok=True)
        return None

    def _over(self, code: int, why: str) -> SupervisorEnd:
        log.info("over: %d, %s", code, why)
        self.attempts.over(code, why)
        self.incidents.flush()
        self.attempts.flush()
        remove_reserve(self.run.reserve)
        return SupervisorEnd(code=code)

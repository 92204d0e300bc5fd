"""The loop over attempts: start the ranks, watch them, investigate faults, and restart or stop."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trimaran.core import EXIT_AGAIN, EXIT_DONE, Cause, Incident, Plan
from trimaran.launch.attempt_watch import AttemptWatch
from trimaran.launch.directory_watch import DirectoryWatch
from trimaran.launch.elastic_watch import ElasticReplicas, ElasticWatch
from trimaran.launch.incident_text import headline
from trimaran.launch.investigate import Investigation, investigate
from trimaran.launch.network_check import NetworkCheck
from trimaran.launch.next_attempt import (
    Rendezvous,
    apply_decision,
    attempt_spec,
    fit_plan,
    larger_size,
    read_resize_request,
    recovery_options,
)
from trimaran.launch.node import AttemptSpec, Node, on_all_nodes
from trimaran.launch.note_bad_nodes import note_lost_nodes
from trimaran.launch.rank_events import RankEventIncidents
from trimaran.launch.recovery_policy import EXIT_FAULT, Cycle, PolicyDecision, decide
from trimaran.launch.show_ranks import show_ranks
from trimaran.launch.signals import Signals
from trimaran.launch.slow_rank_check import SlowRankCheck
from trimaran.launch.stranger_check import StrangerCheck
from trimaran.run import IncidentLog, Journal, JsonlFollower, RunDirectory, last_step
from trimaran.run.attempts import AttemptLog, AttemptOutcome, read_attempts
from trimaran.run.held_directory import HeldDirectory
from trimaran.run.left_out_nodes import read_left_out

log = logging.getLogger(__name__)

EVENT_BACKLOG_BYTES = 1 << 20  # the last events of a long run are enough
MAX_COSTS = ("max_lost_steps", "max_lost_seconds")

POLL_SECONDS, PAUSE_PER_POLL = 0.05, 4.0
LEASE_SECONDS = 1.0  # between checks of the lease
LONG_WAIT_SECONDS = 1.0  # a longer wait for nodes is recorded with the incident

SupervisorOutcome = AttemptOutcome | Literal["killed", "fenced", "deleted"]


class NodeGroup(Rendezvous, Protocol):
    """The nodes of a run and where their ranks meet: one machine (`local_node_group`) or several."""

    def wait_for_nodes(self) -> list[Node] | None:
        """Return the nodes to start ranks on, once enough are present; None if too few come."""
        ...

    def growth(self, nodes: Sequence[Node]) -> int | None:
        """Return how many ranks are possible, if more nodes are present than `nodes`; None if not."""
        ...

    def leaving(self, nodes: Sequence[Node]) -> list[str]:
        """Return the names of those of `nodes` whose supervisors were asked to stop, except for this one."""
        ...

    def can_go_on(self) -> bool:
        """Return whether the nodes that are present, without those that leave, are enough."""
        ...

    def can_hand_over(self) -> bool:
        """Return whether another node can coordinate, and enough nodes would be left without this one."""
        ...

    def joined(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes that are present and not among `nodes`."""
        ...

    def exchange_keys(self, attempt: int, prefix: str, written: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Write to the store of an attempt, in order, and return the values whose keys begin with `prefix`."""
        ...

    def end_attempt(self, attempt: int) -> None:
        """Drop what the ranks of `attempt`, which are gone, left in the store."""
        ...

    def holds(self) -> bool:
        """Return whether this supervisor still holds the run's lease."""
        ...

    def count_refused(self) -> int:
        """Return how many connections to the run's channel were closed because they did not prove its token."""
        ...


@dataclass(slots=True, kw_only=True)
class OpenIncident:
    """An incident whose cost is not known yet: when it began, and the highest step that was finished by then."""

    incident: Incident
    since: float
    highest_step: int


def file_lost_supervisor(run: RunDirectory) -> OpenIncident | None:
    """File an incident if the previous supervisor was killed, which never wrote that it was over; None if not."""
    known = read_attempts(run)
    if not known.attempts or known.over is not None:
        return None
    last, step = known.attempts[-1], last_step(run)
    what = f"the previous supervisor was killed (process {last.pid} on {last.host})"
    events = JsonlFollower(run.events(0), backlog=EVENT_BACKLOG_BYTES).new()
    bounds = [each.get("data", {}) for each in events if each.get("kind") == "loss_bound"]
    found = {f"max_lost_{name}": bounds[-1].get(f"node_{name}") for name in ("steps", "seconds")} if bounds else {}
    cost = {key: each for key, each in found.items() if each is not None}
    incident = IncidentLog(run).notice("host", what, attempt=last.number, step=step, action="restarted", cost=cost)
    return OpenIncident(incident=incident, since=time.monotonic(), highest_step=step)


class Supervisor:
    """Supervises a run to its end, through any number of attempts.

    `highest_step` is the highest step that the run had finished before. `open_incident`: another supervisor or
    coordinator was lost, and this one takes over. `held`: the run directory, if it is to be noticed that it was moved.
    `handed_over`: only this node stopped; the run goes on, and another node has to coordinate it.
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
        self._directory = DirectoryWatch(run, self.incidents, self.attempts, held=held)
        self.history: list[Cycle] = []
        self._highest_step = highest_step
        self._open_incidents: list[OpenIncident] = [open_incident] if open_incident else []
        self._stop_incident: Incident | None = None  # set once a stop of the run is requested
        self._stop_since = 0.0
        self._new_size: int | None = None  # the requested number of ranks, if it is to change
        self._leaving: list[str] = []  # nodes without which the run is to go on
        self._stopping = False  # the ranks were asked to stop
        self.handed_over = self._is_own_stop = False
        self._has_started = False
        self._capacity = 0
        self._lease_due = 0.0

    def supervise(self) -> int:
        """Return the exit code of the run: 0 done, 2, 75, 93, 128 + a signal, or another for a fault."""
        self.run.stop_request.unlink(missing_ok=True)
        self._directory.poll()
        if self.signals.stop_requested and not self._open_incidents:
            return self._over(EXIT_AGAIN, f"stopped by {self.signals.name} before anything was started")
        while True:
            began = time.monotonic()
            nodes = self.node_group.wait_for_nodes()
            if self._open_incidents and time.monotonic() > began + LONG_WAIT_SECONDS:
                last = self._open_incidents[-1]
                last.incident = self.incidents.amend(last.incident, action="waited")
            if nodes is None:
                return self._over_without_nodes()
            if error := self._fit_plan(nodes):
                return self._over(EXIT_FAULT, error)
            code = self._attempt(nodes)
            if code is not None:
                return code

    def _fit_plan(self, nodes: Sequence[Node]) -> str:
        """Fit the plan to the nodes that are present, and record if the run gets smaller. Returns an error, or ""."""
        size, requested = self.run.read_plan().mesh.world_size, self._new_size
        if not self._has_started and self._may_grow():
            requested = larger_size(self.run, capacity=sum(node.num_ranks for node in nodes))
        self._has_started, self._capacity = True, 0
        error = fit_plan(self.run, nodes, world_size=requested)
        self._new_size, new = None, self.run.read_plan().mesh.world_size
        if new < size and requested is None:
            why = f"{size} ranks before, {new} now: the nodes hold no more"
            if not self._open_incidents:
                self.incidents.notice("host", "nodes are missing", action="resized", evidence={"why": why})
            for each in self._open_incidents[-1:]:
                evidence = each.incident.evidence | {"why": why}
                each.incident = self.incidents.amend(each.incident, action="resized", evidence=evidence)
        return error

    def _may_grow(self) -> bool:
        """Return whether more nodes may be here than the plan is for: they were lost, or join an elastic run."""
        is_elastic = bool(self.recipe.faults.ranks) or bool(read_attempts(self.run).attempts)
        return is_elastic and self.node_group.growth(()) is not None

    def _attempt(self, nodes: Sequence[Node]) -> int | None:
        """Start the ranks and supervise them to their end. Returns the run's exit code; None: start again."""
        plan, before = self.run.read_plan(), self._highest_step
        number = self.attempts.begin(world_size=plan.mesh.world_size)
        log.info("start %d: %s on %s", number + 1, plan, ", ".join(node.name for node in nodes))
        watch = self._start_ranks(nodes, plan, attempt_spec(self.run, plan, self.node_group, attempt=number))
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
            return EXIT_FAULT  # another process holds the lease: this one must not write any more
        if outcome == "deleted" and self._directory.held is not None:
            raise self._directory.held.lost_error()
        self.node_group.end_attempt(number)
        self._settle(watch, is_over=outcome in ("done", "stopped") or watch.is_saved)
        if watch.is_saved:
            self.attempts.end("done", step=watch.highest_step)
            return self._finish(watch, investigation)
        self.attempts.end(outcome if outcome in ("done", "stopped") else "trouble", step=watch.highest_step)
        if investigation is not None:
            return self._recover(investigation, new_steps=self._highest_step - before)
        if outcome == "killed":
            if self._stop_incident is not None:
                self.incidents.amend(self._stop_incident, action="stopped", step=watch.highest_step)
            return self._over(self.signals.exit_code, f"ended at once by {self.signals.name}")
        return self._over(EXIT_DONE, "all steps are done") if outcome == "done" else self._stopped(watch)

    def _start_ranks(self, nodes: Sequence[Node], plan: Plan, spec: AttemptSpec) -> AttemptWatch:
        """Start the ranks and return what watches them."""
        if plan.is_elastic:
            replicas = ElasticReplicas(num=plan.mesh.dp_replicate, restart=self.recipe.faults.restart)
            return ElasticWatch(self.run, nodes, spec, replicas, incidents=self.incidents, group=self.node_group)
        return AttemptWatch(self.run, nodes, spec)

    def _finish(self, watch: AttemptWatch, investigation: Investigation | None) -> int:
        """End a run whose training is done and saved. Returns 0, whatever happened to its ranks after that."""
        why = "all steps are done and saved"
        left, step = watch.not_done(), watch.highest_step
        reason = "it was ended at once" if self.signals.kill_requested else "a rank ended"
        if investigation is not None:
            evidence = investigation.incident.evidence | {"why": f"{why}; not done: {', '.join(left) or 'nothing'}"}
            incident = self.incidents.amend(investigation.incident, action="finished", evidence=evidence)
            log.warning("%s: %s", headline(incident), evidence["why"])
            reason = incident.what
        if self._stop_incident is not None:
            self.incidents.amend(self._stop_incident, action="finished", step=step)
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
        strangers = StrangerCheck(self.incidents, watch, self.node_group.count_refused)
        num_read, began = 0, time.monotonic()
        while (outcome := watch.poll()) is None:
            network.poll()
            strangers.poll()
            slow_ranks.poll(watch)
            reported.add(watch.events[num_read:])
            num_read = len(watch.events)
            self._settle(watch)
            self._directory.poll()
            if self._directory.deleted:
                return "deleted"
            if self._lost_the_lease():
                return "fenced"
            if self.signals.kill_requested:
                return "killed"
            self._forward_requests(watch)
            if self.signals.show_requested:
                self.signals.show_requested = False
                show_ranks(self.run, watch.nodes, range(watch.spec.world_size))
            # With thousands of ranks a poll takes longer, and must leave most of a core to the channel.
            time.sleep(max(POLL_SECONDS, PAUSE_PER_POLL * (time.monotonic() - began)))
            began = time.monotonic()
        reported.add(watch.events[num_read:])
        return outcome

    def _lost_the_lease(self) -> bool:
        now = time.monotonic()
        if now < self._lease_due:
            return False
        self._lease_due = now + LEASE_SECONDS
        return not self.node_group.holds()

    def _forward_requests(self, watch: AttemptWatch) -> None:
        """Ask the ranks to stop if a stop or another number of ranks was requested; a resize is a stop and a start."""
        stop_file = self.run.stop_request.exists() and not self._stopping
        known: Mapping[str, Any] = {"attempt": watch.spec.attempt, "step": watch.highest_step}
        if self._stop_incident is None and (moved := self._directory.moved):
            log.error("%s; stopping with a checkpoint there", moved)
            self._stop_since = time.monotonic()
            self._stop_incident = self.incidents.notice("storage", moved, **known)
        elif self._stop_incident is None and (self.signals.stop_requested or stop_file):
            what = f"the run was asked to stop by {self.signals.name}"
            self._stop_since = time.monotonic()
            self._stop_incident = self.incidents.notice("preempted", what, **known)
            self._is_own_stop = not stop_file
        elif not self._stopping:
            self._leaving = self.node_group.leaving(watch.nodes)
            if isinstance(watch, ElasticWatch):
                self._leaving = watch.let_leave(self._leaving)
            self._new_size = None
            if not self._leaving and not isinstance(watch, ElasticWatch):  # its nodes come and go within the attempt
                self._new_size = read_resize_request(self.run, watch.nodes) or self._growth(watch)
        if not self._stopping and (self._stop_incident or self._new_size or self._leaving):
            self._stopping = True
            for node in watch.nodes:
                node.request_stop()

    def _growth(self, watch: AttemptWatch) -> int | None:
        """Return the number of ranks to continue with if nodes have joined; None if they do not help."""
        capacity = self.node_group.growth(watch.nodes)
        if capacity is None or capacity == self._capacity:
            return None
        self._capacity = capacity  # planned once for each capacity: the answer stays the same
        return larger_size(self.run, capacity=capacity)

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

    def _recover(self, investigation: Investigation, *, new_steps: int) -> int | None:
        """Do what the policy decides about an incident. Returns the run's exit code; None: start again."""
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
        incident = self.incidents.amend(
            incident,
            action=decision.action,
            evidence=incident.evidence | {"why": decision.why} | decision.settings,
            cost=incident.cost | {key: each for key, each in cost.items() if each},
        )
        log.warning("%s: %s; %s", headline(incident), decision.action, decision.why)
        self.history.append(Cycle(incident=incident, new_steps=new_steps))
        if decision.action == "stopped":
            return self._over(decision.code, f"{incident.what}; {decision.why}")
        opened = OpenIncident(incident=incident, since=investigation.since, highest_step=self._highest_step)
        self._open_incidents.append(opened)
        apply_decision(self.run, self.recipe, decision, incident)
        self._stopping, self._new_size, self._leaving = self._stop_incident is not None, None, []
        if not self._stopping:
            self.run.stop_request.unlink(missing_ok=True)  # ours, for a resize that the incident interrupted
        return None

    def _stopped(self, watch: AttemptWatch) -> int | None:
        """Handle that all ranks stopped with a complete checkpoint. Returns the run's exit code; None: resize."""
        known: Mapping[str, Any] = {"attempt": watch.spec.attempt, "step": watch.highest_step}
        leaving, self._leaving = self.node_group.leaving(watch.nodes), []
        if self._stop_incident is None and (self._new_size is not None or (leaving and self.node_group.can_go_on())):
            if leaving:
                was_asked = any(getattr(node, "leaving", False) for node in watch.nodes)
                is_slow = bool(read_left_out(self.run)) and not was_asked
                why = "left out" if is_slow else "asked to stop"
                what = f"{', '.join(leaving)}: {why}; the other nodes continue"
                cause: Cause = "straggler" if is_slow else "preempted"
                incident = self.incidents.notice(cause, what, action="continued", **known)
                log.warning("%s", headline(incident))
                opened = OpenIncident(incident=incident, since=time.monotonic(), highest_step=watch.highest_step)
                self._open_incidents.append(opened)
            self.run.resize_request.unlink(missing_ok=True)
            self.run.stop_request.unlink(missing_ok=True)
            self._stopping = False
            return None
        who = ", ".join(leaving) or "a rank"
        what = f"{who} was asked to stop, and all ranks stopped"
        seconds = time.monotonic() - self._stop_since if self._stop_incident else 0.0
        incident = self._stop_incident or self.incidents.notice("preempted", what, **known)
        cost = {"seconds_to_stop": round(seconds, 3), "lost_steps": 0.0}
        if self._is_own_stop and self.node_group.can_hand_over():
            self.handed_over = True
            why = "only the node that coordinates was asked to stop; the others continue"
            log.warning("%s", why)
            evidence = incident.evidence | {"why": why}
            self.incidents.amend(incident, action="continued", step=watch.highest_step, cost=cost, evidence=evidence)
            return EXIT_AGAIN
        self.incidents.amend(incident, action="saved", step=watch.highest_step, cost=cost)
        moved = f"{self._directory.moved}; " if self._directory.moved else ""
        how = "with a complete checkpoint; `trimaran resume` continues"
        if self.recipe.checkpoint.is_off:
            how = "without a checkpoint (checkpoint.every: off); `trimaran resume` starts from the first step"
        return self._over(EXIT_AGAIN, f"{moved}stopped {how}")

    def _over_without_nodes(self) -> int:
        """End the run, because a stop is requested or too few nodes are present."""
        if not self.signals.stop_requested:
            return self._over(EXIT_AGAIN, "too few nodes")
        for each in self._open_incidents:
            if each.incident.cause == "preempted":  # the others were asked first
                self.incidents.amend(each.incident, action="saved")
        return self._over(EXIT_AGAIN, "asked to stop")

    def _over(self, code: int, why: str) -> int:
        log.info("over: %d, %s", code, why)
        self.attempts.over(code, why)
        self._directory.end()
        return code

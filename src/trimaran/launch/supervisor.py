"""The loop over attempts: start the ranks, watch them, find out what went wrong, and go on or give up."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trimaran.core import EXIT_AGAIN, EXIT_DONE, Incident
from trimaran.launch.attempt_watch import AttemptWatch
from trimaran.launch.incident_text import headline
from trimaran.launch.investigate import Investigation, investigate
from trimaran.launch.network_check import NetworkCheck
from trimaran.launch.next_attempt import (
    Rendezvous,
    fit_plan,
    larger_size,
    means_of,
    orders_for,
    read_wanted_size,
    repair,
)
from trimaran.launch.node import Node, on_all
from trimaran.launch.policy import EXIT_FAULT, Cycle, decide
from trimaran.launch.rank_events import RankEventIncidents
from trimaran.launch.show_ranks import show_ranks
from trimaran.launch.signals import Signals
from trimaran.launch.slow_rank_check import SlowRankCheck
from trimaran.run import IncidentLog, RunDirectory, last_step
from trimaran.run.attempts import AttemptLog, read_attempts

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
LEASE_SECONDS = 1.0
WAIT_SECONDS = 1.0  # for nodes: longer is worth a word

End = Literal["done", "stopped", "trouble", "killed", "fenced"]


class NodeGroup(Rendezvous, Protocol):
    """The machines of a run and where their ranks meet. `local_fleet` is one machine, `fleet` several."""

    def wait_for_nodes(self) -> list[Node] | None:
        """Return the nodes to start ranks on, waiting for those that are to come; None when too few will."""
        ...

    def growth(self, nodes: Sequence[Node]) -> int | None:
        """Return how many ranks there could be, now that there are more machines than `nodes`; None: no more."""
        ...

    def over(self, attempt: int) -> None:
        """The ranks of `attempt` are gone: nothing that they left in the store is of use."""
        ...

    def holds(self) -> bool:
        """Whether this supervisor is still the one that may run the run."""
        ...


@dataclass(slots=True, kw_only=True)
class LostNode:
    """An incident whose price is not known yet: when it began, and how far the run had come."""

    incident: Incident
    since: float
    highest: int


def lost_supervisor(run: RunDirectory) -> LostNode | None:
    """File that the supervisor before this one was killed, if it was: it never wrote down that it was over."""
    known = read_attempts(run)
    if not known.attempts or known.over is not None:
        return None
    last, step = known.attempts[-1], last_step(run)
    what = f"the supervisor before this one was killed (process {last.pid} on {last.host})"
    incident = IncidentLog(run).notice("host", what, attempt=last.number, step=step, action="restarted")
    return LostNode(incident=incident, since=time.monotonic(), highest=step)


class Supervisor:
    """Runs a run to its end, whatever happens on the way.

    `highest` is the largest number of steps that the run had ever finished before; `loss` is what made this one the
    run's supervisor, where another one was lost.
    """

    def __init__(
        self, run: RunDirectory, fleet: NodeGroup, signals: Signals, *, highest: int = 0, loss: LostNode | None = None
    ) -> None:
        self.run, self.fleet, self.signals = run, fleet, signals
        self.recipe = run.read_recipe()
        self.incidents, self.attempts = IncidentLog(run), AttemptLog(run)
        self.history: list[Cycle] = []
        self._highest = highest
        self._losses: list[LostNode] = [loss] if loss else []
        self._asked: Incident | None = None  # somebody wants the run to end
        self._new_size: int | None = None  # somebody wants another number of ranks
        self._stopping = False  # the ranks were told
        self._room = 0
        self._lease_due = 0.0

    def supervise(self) -> int:
        """Return the exit code of the run: 0 done, 2, 75, 93, 128 + a signal, or another for a fault."""
        self.run.stop_request.unlink(missing_ok=True)
        if self.signals.asked and not self._losses:
            return self._over(EXIT_AGAIN, f"asked to end by {self.signals.name} before anything was started")
        while True:
            began = time.monotonic()
            nodes = self.fleet.wait_for_nodes()
            if self._losses and time.monotonic() > began + WAIT_SECONDS:
                self._losses[-1].incident = self.incidents.amend(self._losses[-1].incident, action="waited")
            if nodes is None:
                return self._over(EXIT_AGAIN, "asked to end" if self.signals.asked else "too few nodes")
            if why := self._fit(nodes):
                return self._over(EXIT_FAULT, why)
            code = self._attempt(nodes)
            if code is not None:
                return code

    def _fit(self, nodes: Sequence[Node]) -> str:
        """Give the run a plan for the nodes that are there, and say so: no run gets smaller in silence."""
        size, asked = self.run.read_plan().mesh.world_size, self._new_size
        why = fit_plan(self.run, nodes, world_size=asked)
        self._new_size, new = None, self.run.read_plan().mesh.world_size
        if new < size and asked is None:
            words = f"{size} ranks before, {new} now: there is no room for more"
            if not self._losses:
                self.incidents.notice("host", "nodes are missing", action="resized", evidence={"why": words})
            for loss in self._losses[-1:]:
                known = loss.incident.evidence | {"why": words}
                loss.incident = self.incidents.amend(loss.incident, action="resized", evidence=known)
        return why

    def _attempt(self, nodes: Sequence[Node]) -> int | None:
        """Start the ranks and stay with them to their end. Returns the run's exit code; None: start again."""
        plan, before = self.run.read_plan(), self._highest
        number = self.attempts.begin(world_size=plan.mesh.world_size)
        log.info("start %d: %s on %s", number + 1, plan, ", ".join(node.name for node in nodes))
        watch = AttemptWatch(self.run, nodes, orders_for(plan, self.fleet, attempt=number))
        end = self._follow(watch)
        finding = investigate(self.run, watch, self.incidents, step=watch.highest) if end == "trouble" else None
        on_all(nodes, lambda node: node.kill())
        if end == "fenced":
            return EXIT_FAULT  # somebody else runs this run now: nothing more is ours to write
        self.fleet.over(number)
        self._settle(watch, is_over=end in ("done", "stopped"))
        self.attempts.end(end if end in ("done", "stopped") else "trouble", step=watch.highest)
        if finding is not None:
            return self._answer(finding, new_steps=self._highest - before)
        if end == "killed":
            if self._asked is not None:
                self.incidents.amend(self._asked, action="stopped", step=watch.highest)
            return self._over(self.signals.exit_code, f"ended at once by {self.signals.name}")
        return self._over(EXIT_DONE, "all steps are done") if end == "done" else self._stopped(watch)

    def _follow(self, watch: AttemptWatch) -> End:
        """Look until something ends the attempt; what is left of the ranks still lives then."""
        # What a lost rank costs is counted with its own incident.
        had = 0 if self._losses else self._highest
        reports, taken = RankEventIncidents(self.incidents, attempt=watch.orders.attempt, had=had), 0
        pace = NetworkCheck(self.run, self.incidents, watch)
        roll_call = SlowRankCheck(self.run, self.incidents)
        while (sign := watch.look()) is None:
            pace.look()
            roll_call.take(watch)
            reports.take(watch.events[taken:])
            taken = len(watch.events)
            self._settle(watch)
            if self._lost_the_lease():
                return "fenced"
            if self.signals.urgent:
                return "killed"
            self._heed_wishes(watch)
            if self.signals.curious:
                self.signals.curious = False
                show_ranks(self.run, watch.nodes, range(watch.orders.world_size))
            time.sleep(LOOK_SECONDS)
        reports.take(watch.events[taken:])
        return sign

    def _lost_the_lease(self) -> bool:
        now = time.monotonic()
        if now < self._lease_due:
            return False
        self._lease_due = now + LEASE_SECONDS
        return not self.fleet.holds()

    def _heed_wishes(self, watch: AttemptWatch) -> None:
        """Pass on what people ask for: an end, or another number of ranks, which is an end and a start."""
        if self._asked is None and (self.signals.asked or (self.run.stop_request.exists() and not self._stopping)):
            self._asked = self.incidents.notice("preempted", f"the run was asked to end by {self.signals.name}",
                                                attempt=watch.orders.attempt, step=watch.highest)  # fmt: skip
        elif not self._stopping:
            self._new_size = read_wanted_size(self.run, watch.nodes) or self._growth(watch)
        if not self._stopping and (self._asked or self._new_size):
            self._stopping = True
            for node in watch.nodes:
                node.ask_to_stop()

    def _growth(self, watch: AttemptWatch) -> int | None:
        """Return how many ranks to go on with when machines have come; None when nothing is gained by them."""
        room = self.fleet.growth(watch.nodes)
        if room is None or room == self._room:
            return None
        self._room = room  # looked at once: the answer stays the same
        return larger_size(self.run, room=room)

    def _settle(self, watch: AttemptWatch, *, is_over: bool = False) -> None:
        """Write down what incidents have cost, once the run is farther than before them, or well at its end."""
        self._highest = max(self._highest, watch.highest)
        settled = [loss for loss in self._losses if is_over or watch.highest > loss.highest]
        for loss in settled:
            came_back = min((event["step"] for event in watch.of_kind("ready")), default=loss.highest)
            cost = {
                "seconds_to_recover": round(time.monotonic() - loss.since, 3),
                "lost_steps": max(0, loss.highest - came_back),
            }
            self.incidents.amend(loss.incident, cost=loss.incident.cost | cost)
            self._losses.remove(loss)

    def _answer(self, finding: Investigation, *, new_steps: int) -> int | None:
        """Do what the policy says about the trouble. Returns the run's exit code; None: start again."""
        cycle = Cycle(incident=finding.incident, new_steps=new_steps)
        means = means_of(self.run, self.recipe)
        course = decide([*self.history, cycle], self.recipe.faults, means)
        incident = self.incidents.amend(
            finding.incident, action=course.action, evidence=finding.incident.evidence | {"why": course.why}
        )
        log.warning("%s: %s; %s", headline(incident), course.action, course.why)
        self.history.append(Cycle(incident=incident, new_steps=new_steps))
        if course.action == "stopped":
            return self._over(course.code, f"{incident.what}; {course.why}")
        self._losses.append(LostNode(incident=incident, since=finding.since, highest=self._highest))
        repair(self.run, self.recipe, course, incident)
        self._stopping, self._new_size = self._asked is not None, None
        if not self._stopping:
            self.run.stop_request.unlink(missing_ok=True)  # ours, for a resize that did not come about
        return None

    def _stopped(self, watch: AttemptWatch) -> int | None:
        """All ranks left together with a complete checkpoint: the end, or the moment for another number of ranks."""
        if self._asked is None and self._new_size is not None:
            self.run.resize_request.unlink(missing_ok=True)
            self.run.stop_request.unlink(missing_ok=True)
            self._stopping = False
            return None
        asked = self._asked or self.incidents.notice("preempted", "a rank was asked to end, and all did",
                                                     attempt=watch.orders.attempt, step=watch.highest)  # fmt: skip
        cost = {"seconds_to_stop": round(time.time() - asked.time, 3), "lost_steps": 0.0}
        self.incidents.amend(asked, action="saved", step=watch.highest, cost=cost)
        return self._over(EXIT_AGAIN, "stopped with a complete checkpoint; `trimaran resume` goes on")

    def _over(self, code: int, why: str) -> int:
        log.info("over: %d, %s", code, why)
        self.attempts.over(code, why)
        return code

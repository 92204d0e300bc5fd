"""A run on several machines: who coordinates, and what a machine does when it loses the others.

Every node runs the same command. Whoever gets the run's lease coordinates: it serves the channel, waits for the others
and is the supervisor of all. The others obey (`member`). A node that loses the coordinator kills its ranks, and takes
over when the coordinator's lease is dead; a coordinator that loses its lease kills its ranks, and obeys.
"""

import logging
import time
from dataclasses import replace
from typing import Any

from trimaran.core import EXIT_USER, Action, Cause, Incident, UserError
from trimaran.launch.follower import Follower, FollowerEnd
from trimaran.launch.node_agent import NodeAgent
from trimaran.launch.node_fleet import FencedError, RemoteNodeGroup
from trimaran.launch.node_options import NodeOptions
from trimaran.launch.signals import Signals
from trimaran.launch.supervisor import LostNode, Supervisor
from trimaran.run import IncidentLog, RunDirectory, append_line, last_step
from trimaran.run.attempts import read_attempts
from trimaran.run.lease import Holder, LeaseWatch, claim, refusal

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
AGAIN_SECONDS = 0.5  # between tries to reach a coordinator
TAKE_OVER_SECONDS = 30.0  # for those that are left of a run to find a coordinator; half of that is usual
TAKEN_SECONDS = 8.0  # a place that was ours is free again after this


def run_with_others(run: RunDirectory, node_options: NodeOptions, signals: Signals, *, check: bool = True) -> int:
    """Take part in `run` until it is over, in whichever role, and return its exit code.

    With `check` a machine on which the run could not work keeps the run from starting, on all nodes.
    """
    agent = NodeAgent(run, node_options, check=check)
    try:
        return Roles(agent, signals).play()
    finally:
        agent.close()


class Roles:
    """What this machine has been in the run so far. `formed`: it has worked together with others."""

    def __init__(self, agent: NodeAgent, signals: Signals) -> None:
        self._agent, self._signals = agent, signals
        self._watch = LeaseWatch(agent.run)
        self._formed = False
        self._apart: Incident | None = None  # we lost the coordinator, and have not found one since
        self._since = self._began = time.monotonic()
        self._unfit: UserError | None = None

    def play(self) -> int:
        """Coordinate or obey, as the lease has it, until the run is over; return its exit code."""
        self._unfit = self._look()
        while not self._agent.node.warm and not self._signals.asked and not self._unfit:
            time.sleep(LOOK_SECONDS)  # a node is of use to the others when its ranks can start
        while True:
            found = self._watch.look()
            if isinstance(found, int) and self._unfit and not self._may_refuse(self._unfit):
                time.sleep(AGAIN_SECONDS)
                continue
            if isinstance(found, int) and self._formed and (over := read_attempts(self._agent.run).over) is not None:
                return over  # the run ended while we could not hear it
            code = self._coordinate(found) if isinstance(found, int) else self._obey(found)
            if code is not None:
                return code

    def _look(self) -> UserError | None:
        """Return why the run could not work on this machine, which people are told at once; None where it could."""
        unfit = self._agent.look.refusal() if self._agent.look else None
        if unfit:
            log.error("%s", unfit)
        return unfit

    def _may_refuse(self, unfit: UserError) -> bool:
        """Whether a machine that is unfit may take the lease, to tell those that come: not that of a run under way,
        which others go on with. Raises when nobody is left to be told."""
        if self._formed or self._signals.asked:
            raise unfit
        known = read_attempts(self._agent.run)
        is_under_way = bool(known.attempts) and known.over is None
        return not is_under_way or time.monotonic() > self._began + TAKE_OVER_SECONDS

    def _coordinate(self, term: int) -> int | None:
        """Return the run's exit code; None when somebody else coordinates, or was quicker."""
        lease = claim(self._agent.run, term, address=self._agent.channel.address, shared=True)
        if lease is None:
            return None
        log.info("coordinating under term %d at %s", lease.term, lease.holder.address)
        fleet = RemoteNodeGroup(self._agent, lease, self._signals, formed=self._formed, unfit=self._unfit)
        with lease:
            run, loss = self._agent.run, self._take_over()
            try:
                code = Supervisor(run, fleet, self._signals, highest=last_step(run), loss=loss).supervise()
                if lease.holds():
                    fleet.dismiss(code)
                    return code
            except FencedError:
                pass
            except UserError as refusal:
                fleet.dismiss(EXIT_USER, refusal)
                raise
            self._agent.node.kill()
            self._formed = True
            self._part(FollowerEnd(why="our lease is over, somebody else coordinates", met=True, under_way=True))
        return None

    def _obey(self, holder: Holder) -> int | None:
        """Return the run's exit code; None when the coordinator was lost, or cannot be reached."""
        if not holder.address:
            raise refusal(self._agent.run, holder)  # one machine runs it alone
        member = Follower(self._agent.run, self._agent.node, holder, self._agent.token, unfit=self._unfit)
        if member.meet(self._signals):
            self._together("network", "waited", f"{holder.host} coordinates")
        parting = member.serve(self._watch, self._signals)
        if parting.refusal is not None:
            raise parting.refusal
        if parting.code is not None:
            return parting.code
        if parting.taken and time.monotonic() - self._since > TAKEN_SECONDS:
            raise UserError("S025", f"a node of this name takes part in run {holder.run} already",
                            where=self._agent.node.name, fix="start one supervisor on each node")  # fmt: skip
        if not parting.taken:
            self._part(parting)
        time.sleep(AGAIN_SECONDS)
        return None

    def _part(self, parting: FollowerEnd) -> None:
        """File that we have lost the coordinator, once for each time that we had one."""
        self._formed |= parting.met
        if self._apart is None and parting.met:
            self._since = time.monotonic()
            self._apart = self._file(
                Incident(
                    id=f"{self._agent.node.name}-{time.monotonic_ns()}",
                    cause="network",
                    time=time.time(),
                    what=f"{self._agent.node.name} lost the coordinator: {parting.why}",
                    step=last_step(self._agent.run),
                    evidence={"ranks_killed": parting.under_way},
                )
            )

    def _take_over(self) -> LostNode | None:
        """Return what a lost coordinator costs the run, filed for the whole run by whoever takes its place."""
        if self._apart is None:
            return None
        lost, run = self._apart, self._agent.run
        self._together("host", "restarted", "its lease is over, and we coordinate now")
        known: dict[str, Any] = {"step": lost.step, "evidence": {"noticed": lost.time}, "action": "restarted"}
        incident = IncidentLog(run).notice("host", lost.what, attempt=len(read_attempts(run).attempts) - 1, **known)
        return LostNode(incident=incident, since=self._since, highest=lost.step)

    def _together(self, cause: Cause, action: Action, why: str) -> None:
        """Amend what was filed when we lost the coordinator: there is one again."""
        if self._apart is not None:
            seconds = {"seconds_apart": round(time.monotonic() - self._since, 3)}
            self._file(replace(self._apart, cause=cause, action=action, cost=seconds,
                               evidence=self._apart.evidence | {"why": why}))  # fmt: skip
        self._apart = None

    def _file(self, incident: Incident) -> Incident:
        """Write an incident of this node: those of the run are the coordinator's to write."""
        log.warning("%s (%s)", incident.what, incident.action or "noticed")
        append_line(self._agent.run.path / f"incidents-{self._agent.node.name}.jsonl", incident.as_dict())
        return incident

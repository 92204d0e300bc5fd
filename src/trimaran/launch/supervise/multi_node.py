"""A run on several machines: which node coordinates, and what a node does when it loses the coordinator.

Every node runs the same command. The node that gets the run's lease coordinates: it serves the channel, waits for the
other nodes and supervises all ranks. The others follow (`follower`). A node that loses the coordinator kills its ranks,
and takes over when the coordinator's lease has expired. A coordinator that loses its lease kills its ranks and follows.

If the nodes have no disk in common, each has a run directory of its own, and one of them, the head, coordinates always.
The others get recipe and plan from it and send it what their ranks write (`head_client`, `FileSender`).
"""

import logging
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

from trimaran.core import EXIT_AGAIN, EXIT_USER, Action, Cause, Incident, UserError
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.launch.supervise.follower import Follower, FollowerEnd, NodeAgent
from trimaran.launch.supervise.fork_server_process import ForkServerProcess
from trimaran.launch.supervise.head_client import RUN_FILES, FileSender, HeadClient, answer_nodes
from trimaran.launch.supervise.investigate import OpenIncident
from trimaran.launch.supervise.node_options import NodeOptions
from trimaran.launch.supervise.remote_node_group import FencedError, RemoteNodeGroup
from trimaran.launch.supervise.side_processes import autopilot_process
from trimaran.launch.supervise.supervisor import Supervisor
from trimaran.runs import AttemptLog, HeldDirectory, IncidentLog, append_line, last_step, read_attempts
from trimaran.runs.lease import LeaseHolder, LeaseWatch, claim_term, held_lease_error

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
RETRY_SECONDS = 0.5  # between attempts to reach a coordinator
TAKE_OVER_SECONDS = 30.0  # for the remaining nodes of a run to get a coordinator; half of that is usual
NAME_TAKEN_SECONDS = 8.0  # after a lost connection; then our old session has timed out, and another node uses our name


def run_on_several_nodes(
    held: HeldDirectory,
    node_options: NodeOptions,
    signals: Signals,
    *,
    check: bool = True,
    fork_server: ForkServerProcess | None = None,
) -> int:
    """Take part in a run to its end; return its exit code. With `check`, an unfit machine keeps all from starting."""
    agent = NodeAgent(held.run, node_options, check=check, fork_server=fork_server)
    is_follower = node_options.own_disk and not agent.is_head
    head = HeadClient(node_options.head_address, agent.token, node_options.name) if is_follower else None
    try:
        return Participant(agent, held, signals, head=head).run_to_end()
    finally:
        agent.close()


class Participant:
    """This machine's role in the run over time. `formed`: it has worked together with other nodes.

    `head`: the node that coordinates as long as the run lives, because this one has no disk in common with it.
    """

    def __init__(
        self, agent: NodeAgent, held: HeldDirectory, signals: Signals, *, head: HeadClient | None = None
    ) -> None:
        self._agent, self._held, self._signals = agent, held, signals
        self._head = head
        self._watch: HeadClient | LeaseWatch = head or LeaseWatch(agent.run)
        self._formed = False
        self._lost_coordinator: Incident | None = None  # filed when we lost it; None while there is a coordinator
        self._since = self._began = time.monotonic()
        self._unfit: UserError | None = None

    def run_to_end(self) -> int:
        """Coordinate or follow, depending on the lease, until the run is over; return its exit code."""
        if self._agent.preflight and (unfit := self._agent.preflight.wait_for_error()):
            log.error("%s", unfit)
            self._unfit = unfit
        while not self._agent.node.warm and not self._signals.stop_requested and not self._unfit:
            time.sleep(POLL_SECONDS)  # join only when the ranks of this node can start
        if self._head is not None:
            # Follow the head until the run is over, or the head is lost for longer than nodes wait for each other.
            # No other node can take over: only the head has the run's records. So the run ends, to be started again.
            wait_seconds = self._agent.node_options.wait_seconds
            while (answer := self._head.ask(self._signals, seconds=wait_seconds)) is not None:
                code = self._follow(self._head.holder, FileSender(self._agent.run, answer.received))
                if code is not None:
                    return code
            return EXIT_AGAIN
        while True:
            holder_or_term = self._watch.poll()
            if isinstance(holder_or_term, LeaseHolder) and self._agent.is_head:
                if isinstance(self._watch, LeaseWatch) and self._watch.certain:
                    raise held_lease_error(self._agent.run, holder_or_term)
                time.sleep(POLL_SECONDS)
                continue
            if isinstance(holder_or_term, LeaseHolder):
                code = self._follow(holder_or_term)
            elif self._unfit and not self._may_refuse(self._unfit):
                time.sleep(RETRY_SECONDS)
                continue
            elif self._formed and (over := read_attempts(self._agent.run).over) is not None:
                return over  # the run ended while we were disconnected
            else:
                code = self._coordinate(holder_or_term)
            if code is not None:
                return code

    def _may_refuse(self, unfit: UserError) -> bool:
        """Return whether an unfit machine may take the lease to refuse the run on all nodes that connect.

        It may not take the lease of a started run, which other nodes continue. Raises if no other node is to be told.
        """
        if self._formed or self._signals.stop_requested:
            raise unfit
        known = read_attempts(self._agent.run)
        is_started = bool(known.attempts) and known.over is None
        return not is_started or time.monotonic() > self._began + TAKE_OVER_SECONDS

    def _coordinate(self, term: int) -> int | None:
        """Return the run's exit code; None if another node coordinates now, or was faster to claim the lease."""
        lease = claim_term(self._agent.run, term, address=self._agent.channel.address, shared=True)
        if lease is None:
            return None
        log.info("coordinating with term %d at %s", lease.term, lease.holder.address)
        nodes = RemoteNodeGroup(self._agent, lease, self._signals, formed=self._formed, unfit=self._unfit)
        with lease, autopilot_process(self._agent.run, os.environ):
            run, incident, lost = self._agent.run, None, self._lost_coordinator
            if lost is not None:  # it becomes an incident of the run
                self._note_coordinator("host", "restarted", "its lease is over, and this node coordinates now")
                about: dict[str, Any] = {"step": lost.step, "evidence": {"noticed": lost.time}, "action": "restarted"}
                attempt = len(read_attempts(run).attempts) - 1
                filed = IncidentLog(run).notice("host", lost.what, attempt=attempt, **about)
                incident = OpenIncident(incident=filed, since=self._since, highest_step=lost.step)
            if self._agent.is_head:
                self._agent.channel.operations[RUN_FILES] = partial(answer_nodes, run, lease.holder)
            try:
                known: dict[str, Any] = {"highest_step": last_step(run), "open_incident": incident}
                end = Supervisor(run, nodes, self._signals, held=self._held, **known).supervise()
                if lease.holds():
                    if not end.handed_over:
                        nodes.dismiss(end.code)
                    return end.code
            except FencedError:
                pass
            except UserError as refusal:
                AttemptLog(run).over(EXIT_USER, f"{refusal.code}: {refusal.what}")
                nodes.dismiss(EXIT_USER, refusal)
                raise
            self._agent.node.kill()
            self._formed = True
            why = "our lease is over, and another node coordinates"
            self._note_lost_coordinator(FollowerEnd(why=why, connected=True, ranks_killed=True))
        return None

    def _follow(self, holder: LeaseHolder, files: FileSender | None = None) -> int | None:
        """Return the run's exit code; None if the coordinator was lost, or cannot be reached."""
        if not holder.address:
            raise held_lease_error(self._agent.run, holder)  # a supervisor on one machine runs it
        agent = self._agent
        follower = Follower(agent, holder, unfit=self._unfit, files=files)
        if follower.wait_until_connected(self._signals):
            self._note_coordinator("network", "waited", f"{holder.host} coordinates")
        end = follower.follow(self._watch, self._signals)
        if end.refusal is not None:
            raise end.refusal
        if end.code is not None:
            return end.code
        if end.name_taken and time.monotonic() - self._since > NAME_TAKEN_SECONDS:
            raise UserError("S025.another-node-name", where=self._agent.node.name, run=holder.run)
        if not end.name_taken:
            self._note_lost_coordinator(end)
        time.sleep(RETRY_SECONDS)
        return None

    def _note_lost_coordinator(self, end: FollowerEnd) -> None:
        """File an incident of this node for a lost coordinator, once for each lost coordinator."""
        self._formed |= end.connected
        if self._lost_coordinator is None and end.connected:
            self._since = time.monotonic()
            self._lost_coordinator = self._file(
                Incident(
                    id=f"{self._agent.node.name}-{time.monotonic_ns()}",
                    cause="network",
                    time=time.time(),
                    what=f"{self._agent.node.name} lost the coordinator: {end.why}",
                    step=last_step(self._agent.run),
                    evidence={"ranks_killed": end.ranks_killed},
                )
            )

    def _note_coordinator(self, cause: Cause, action: Action, why: str) -> None:
        """Amend the incident of a lost coordinator: there is a coordinator again."""
        lost = self._lost_coordinator
        if lost is not None:
            cost = {"seconds_apart": round(time.monotonic() - self._since, 3)}
            self._file(replace(lost, cause=cause, action=action, cost=cost, evidence=lost.evidence | {"why": why}))
        self._lost_coordinator = None

    def _file(self, incident: Incident) -> Incident:
        """Write an incident of this node. Those of the run are written by the coordinator."""
        log.warning("%s (%s)", incident.what, incident.action or "noticed")
        run = self._agent.run
        append_line(run.path / f"incidents-{self._agent.node.name}.jsonl", incident.as_dict(), reserve=run.reserve)
        return incident

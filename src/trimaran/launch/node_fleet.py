"""The nodes of a run as their coordinator sees them: who is there, enough of them or not."""

import logging
import time
from collections.abc import Mapping, Sequence

from trimaran.core import EXIT_USER, Plan, UserError
from trimaran.launch.node import Node
from trimaran.launch.node_agent import NodeAgent
from trimaran.launch.remote_node import RemoteNode
from trimaran.launch.signals import Signals
from trimaran.run import IncidentLog
from trimaran.run.lease import Lease
from trimaran.run.wire import Record

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
REGROUP_SECONDS = 3.0  # for the nodes that are left to find each other after one was lost
FAREWELL_SECONDS = 3.0
SKEW_SECONDS = 5.0  # between wall clocks: worth a word, though nothing depends on it


class FencedError(Exception):
    """Somebody else runs the run now."""


class RemoteNodeGroup:
    """Implements `supervisor.Fleet`. `formed`: the nodes were together before, and a loss made us the coordinator.

    `unfit`: why the run could not work on this machine, which then coordinates only to tell the others.
    """

    def __init__(
        self, agent: NodeAgent, lease: Lease, signals: Signals, *, formed: bool, unfit: UserError | None = None
    ) -> None:
        self.store, self.token = agent.channel.address, agent.token
        self._unfit: dict[str, UserError] = {agent.node.name: unfit} if unfit else {}
        self._agent, self._lease, self._signals, self._formed = agent, lease, signals, formed
        self._remote: dict[str, RemoteNode] = {}
        self._turned_away: set[str] = set()

    def wait_for_nodes(self) -> list[Node] | None:
        """Return the nodes that are there, in the order of their names, once they are enough; None: they are not.

        All of them are waited for at first; later, as few as allowed are enough, after a moment to regroup. Raises when
        the run has not begun and could not work on one of them: by then all that are wanted are there to hear it.
        """
        ask, began = self._agent.node_options, time.monotonic()
        patience = REGROUP_SECONDS if self._formed else ask.wait_seconds
        while not self._signals.asked:
            if not self.holds():
                raise FencedError
            nodes, waited = self._present(), time.monotonic() - began
            if self._unfit and (len(nodes) + len(self._unfit) >= ask.nodes or waited > ask.wait_seconds):
                raise join_refusals(self._unfit)
            if self._unfit:
                time.sleep(LOOK_SECONDS)
                continue
            if len(nodes) >= ask.nodes or (len(nodes) >= ask.min_nodes and waited > patience):
                self._formed = True
                log.info("%d of %d nodes: %s", len(nodes), ask.nodes, ", ".join(node.name for node in nodes))
                return nodes
            if waited > max(patience, ask.wait_seconds):
                return None
            time.sleep(LOOK_SECONDS)
        if self._unfit:
            raise join_refusals(self._unfit)
        return None

    def growth(self, nodes: Sequence[Node]) -> int | None:
        """Return how many ranks there could be now that nodes have come which `nodes`, those at work, lack."""
        there = self._present()
        room = sum(node.num_ranks for node in there)
        return room if len(there) > len(nodes) and room > sum(node.num_ranks for node in nodes) else None

    def environment(self, plan: Plan) -> Mapping[str, str]:
        shared = {
            name: value for name, value in self._agent.environment(plan).items() if name not in self._agent.per_node
        }
        return shared | {"TRIMARAN_TERM": str(self._lease.term)}

    def over(self, attempt: int) -> None:
        self._agent.channel.forget(attempt)

    def holds(self) -> bool:
        return self._lease.holds()

    def dismiss(self, code: int, refusal: UserError | None = None) -> None:
        """Send everybody home with the run's exit code and why; waits a moment until they have heard it."""
        self._present()
        there = [node for node in self._remote.values() if not node.lost]
        for node in there:
            node.dismiss(code, refusal)
        until = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < until and any(not node.lost for node in there):
            time.sleep(LOOK_SECONDS)

    def _present(self) -> list[Node]:
        """Return this node and those that speak to it, in the order of their names; no more than are wanted."""
        for name, mailbox in list(self._agent.channel.desks.items()):
            known = self._remote.get(name)
            if (known is None or known.mailbox is not mailbox) and mailbox.inbox:
                hello = mailbox.inbox.popleft()
                self._remote[name] = RemoteNode(self._agent.run, name, mailbox, num_ranks=int(hello["num_ranks"]))
                self._mention_skew(name, hello)
                self._note_unfit(name, hello)
        for name in [each for each, node in self._remote.items() if node.lost]:
            self._unfit.pop(name, None)
        there: list[Node] = [self._agent.node, *(node for node in self._remote.values() if not node.lost)]
        fit = [node for node in there if node.name not in self._unfit and node.name not in self._turned_away]
        return sorted(fit, key=lambda node: node.name)[: self._agent.node_options.nodes]

    def _note_unfit(self, name: str, hello: Record) -> None:
        """Keep in mind that the run could not work on a node; one that comes while it goes on is turned away."""
        self._unfit.pop(name, None)
        self._turned_away.discard(name)
        if "unfit" not in hello:
            return
        trouble = UserError(**hello["unfit"])
        log.error("%s", trouble)
        if self._formed:
            self._turned_away.add(name)
            self._remote[name].dismiss(EXIT_USER, trouble)
        else:
            self._unfit[name] = trouble

    def _mention_skew(self, name: str, hello: Record) -> None:
        """Tell people when a node's clock differs from ours; files of both would be hard to read side by side."""
        skew = float(hello["time"]) - time.time()
        if abs(skew) > SKEW_SECONDS:
            what = (
                f"the clock of {name} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}; nothing depends on it"
            )
            log.warning(what)
            IncidentLog(self._agent.run).notice("host", what, action="continued", evidence={"skew_seconds": skew})


def join_refusals(unfit: Mapping[str, UserError]) -> UserError:
    """Return one error for all nodes that the run could not work on; those with the same trouble are named together."""
    first = unfit[min(unfit)]
    alike = [name for name, each in sorted(unfit.items()) if (each.code, each.what) == (first.code, first.what)]
    others = [f"{name}: {each.code}, {each.what}" for name, each in sorted(unfit.items()) if name not in alike]
    where = f"node{'s' if alike[1:] else ''} {', '.join(alike)}"
    return UserError(first.code, "; ".join([first.what, *others]), where=where, fix=first.fix)

"""The node group of a run on several machines, as its coordinator sees it: which nodes are connected.

Nodes that the run goes on without are measured from time to time; they are idle, so it costs the run nothing. The first
measurement is made at once, while the node is still slow. Those after it become rarer, from some seconds to minutes. If
one shows a faster node, the next follows soon, to confirm it. The autopilot reads the file and decides.
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trimaran.core import EXIT_USER, Plan, UserError
from trimaran.launch.supervise.channel import Mailbox
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.launch.supervise.follower import NodeAgent
from trimaran.launch.supervise.investigate import note_unfit_node
from trimaran.launch.supervise.local_node import LocalNode
from trimaran.launch.supervise.measure_links import OwnLinks, order_by_links, order_nodes, read_switches
from trimaran.launch.supervise.node import Node, NodeGroup
from trimaran.launch.supervise.remote_node import RemoteNode
from trimaran.runs import IncidentLog, Record, RunDirectory
from trimaran.runs.lease import Lease
from trimaran.runs.node_records import MIN_SPEEDUP, add_speed, read_left_out, read_node_speeds, write_node_speeds

log = logging.getLogger(__name__)

FIRST_SECONDS, MAX_SECONDS = 10.0, 600.0  # between two measurements; doubled each time
MEASURED_SECONDS = 1.0  # a CPU quota applies to periods of 0.1 s: a short measurement would not see it
ANSWER_SECONDS = 60.0  # then the node is asked again


class MeasurableNode(Protocol):
    """A node that can measure how fast its devices compute: `LocalNode` and `RemoteNode`."""

    def begin_speed(self, kind: str, *, seconds: float) -> None:
        """Begin to measure the devices, which must be idle."""

    def take_speed(self) -> float | None:
        """Return the measured speed, once; None until it is known."""


class LeftOutWatch:
    """Keeps the speeds of left-out nodes in the run directory. `kind` is that of their devices: `cpu` or `cuda`."""

    def __init__(self, run: RunDirectory, kind: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._kind, self._clock = run, kind, clock
        self._speeds = read_node_speeds(run)
        self._due: dict[str, float] = {}
        self._pause: dict[str, float] = {}

    def poll(self, nodes: Mapping[str, MeasurableNode]) -> None:
        """Measure those of the left-out nodes, by host, that are due, and note what they answered."""
        gone = self._speeds.keys() - nodes.keys()
        if gone:  # if a node is left out again, it is compared with its speed then
            self._speeds = {host: speeds for host, speeds in self._speeds.items() if host not in gone}
            write_node_speeds(self._run, self._speeds)
        for known in (self._due, self._pause):
            for host in known.keys() - nodes.keys():
                del known[host]
        for host, node in nodes.items():
            now = self._clock()
            if (speed := node.take_speed()) is not None:
                before = self._speeds.get(host, ())
                self._speeds[host] = add_speed(before, speed)
                write_node_speeds(self._run, self._speeds)
                is_faster = bool(before) and speed >= MIN_SPEEDUP * before[0]
                pause = FIRST_SECONDS if is_faster else self._pause.get(host, FIRST_SECONDS)
                self._pause[host] = min(MAX_SECONDS, 2 * pause)
                self._due[host] = now + pause
                log.info(
                    "%s, which is left out, computes %.2f times as fast as then", host, speed / self._speeds[host][0]
                )
            if now >= self._due.get(host, 0.0):
                self._due[host] = now + ANSWER_SECONDS
                node.begin_speed(self._kind, seconds=MEASURED_SECONDS)


POLL_SECONDS = 0.05
MIN_ORDERED_NODES = 3  # the order of two makes no difference
REGROUP_SECONDS = 3.0  # for the remaining nodes to connect after one was lost
DISMISS_SECONDS = 3.0  # for the other nodes to receive the run's exit code
SKEW_SECONDS = 5.0  # a larger difference between wall clocks is reported, although nothing depends on it
MAX_SKEW_INCIDENTS = 8


class FencedError(Exception):
    """Another process holds the run's lease now."""


class RemoteNodeGroup(NodeGroup):
    """The nodes of several machines. `formed`: the run had started before this node became the coordinator.

    `unfit`: why the run cannot work on this machine, which then coordinates only to tell the others.
    """

    def __init__(
        self, agent: NodeAgent, lease: Lease, signals: Signals, *, formed: bool, unfit: UserError | None = None
    ) -> None:
        super().__init__(agent.channel, lease, agent.token)
        self._unfit: dict[str, UserError] = {agent.node.name: unfit} if unfit else {}
        self._agent, self._signals, self._formed = agent, signals, formed
        self._own_disk = agent.node_options.own_disk
        # The node that has to be first, if any: without a shared disk rank 0, which writes the metrics, is on this one.
        self._first = agent.node.name if self._own_disk else ""
        self._remote: dict[str, RemoteNode] = {}
        self._switches = {agent.node.name: read_switches(os.environ)}  # above each node
        self._groups: dict[str, tuple[str, ...]] = {}  # of each node, by measured links
        self._left_out_watch: LeftOutWatch | None = None
        self._turned_away: set[str] = set()
        self._num_skewed = 0
        self._num_before = 0  # nodes of the last start

    def wait_for_nodes(self) -> list[Node] | None:
        """Return the nodes that are present, in the order of their ranks, once they are enough; None if too few come.

        At first it waits for those of a start; later for as many as there were, but the allowed minimum is enough after
        a short time to regroup. Raises if the run has not begun and cannot work on one of them, once all nodes of a
        start are connected and can be told.
        """
        options, began = self._agent.node_options, time.monotonic()
        num_awaited = self._num_before or (options.nodes if self._formed else options.num_at_start)
        num_awaited -= len(self._left_out(self._connected()))
        wait_for_all_seconds = REGROUP_SECONDS if self._formed else options.wait_seconds
        while not self._signals.stop_requested:
            if not self.lease.holds():
                raise FencedError
            nodes, waited = self._present(), time.monotonic() - began
            if self._unfit and (len(nodes) + len(self._unfit) >= num_awaited or waited > options.wait_seconds):
                raise join_refusals(self._unfit)
            if self._unfit:
                time.sleep(POLL_SECONDS)
                continue
            if len(nodes) >= num_awaited or (len(nodes) >= options.min_nodes and waited > wait_for_all_seconds):
                self._formed, self._num_before = True, len(nodes)
                agent = self._agent
                is_measured = agent.recipe.nodes.order == "measured" and not any(self._switches.values())
                if is_measured and len(nodes) >= MIN_ORDERED_NODES:  # order them by measured links
                    links = [OwnLinks(agent.node.name, agent.channel.address, agent.token)]
                    remote = [node for node in nodes if isinstance(node, RemoteNode) and node.channel_address]
                    self._groups = order_by_links(
                        agent.run,
                        [*(links if agent.node in nodes else []), *remote],
                        first=self._first,
                        is_over=lambda: self._signals.stop_requested or not self.lease.holds(),
                    )
                    order = order_nodes({node.name: self._above(node.name) for node in nodes}, first=self._first)
                    nodes = sorted(nodes, key=lambda node: order.index(node.name))
                log.info("%d of %d nodes: %s", len(nodes), options.nodes, ", ".join(node.name for node in nodes))
                return nodes
            if waited > max(wait_for_all_seconds, options.wait_seconds):
                return None
            time.sleep(POLL_SECONDS)
        if self._unfit:
            raise join_refusals(self._unfit)
        return None

    def growth(self, nodes: Sequence[Node]) -> int | None:
        """Return how many ranks are possible now, if more nodes are present than `nodes`, which run; None if not."""
        present = self._present()
        if self._left_out_watch is None and read_left_out(self._agent.run):
            self._left_out_watch = LeftOutWatch(self._agent.run, self._agent.kind)
        if self._left_out_watch is not None:
            idle = [node for node in self._connected() if isinstance(node, RemoteNode | LocalNode)]
            idle = [node for node in idle if node not in present]
            self._left_out_watch.poll({getattr(node, "host", platform.node()): node for node in idle})
        capacity = sum(node.num_ranks for node in present)
        has_grown = len(present) > len(nodes) and capacity > sum(node.num_ranks for node in nodes)
        return capacity if has_grown else None

    def leaving(self, nodes: Sequence[Node]) -> list[str]:
        stopping = [node.name for node in nodes if isinstance(node, RemoteNode) and node.leaving]
        return stopping or [node.name for node in self._left_out(nodes)]

    def can_go_on(self) -> bool:
        return len(self._present()) >= self._agent.node_options.min_nodes

    def can_hand_over(self) -> bool:
        """Wait a few seconds whether the other nodes are asked to stop too, as all nodes of a job are."""
        options, until = self._agent.node_options, time.monotonic() + REGROUP_SECONDS
        if self._own_disk or options.min_nodes == options.nodes:
            return False
        while len(self._present()) - 1 >= options.min_nodes:
            if time.monotonic() > until:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def environment(self, plan: Plan) -> Mapping[str, str]:
        shared = {
            name: value for name, value in self._agent.environment(plan).items() if name not in self._agent.per_node
        }
        return shared | {"TRIMARAN_TERM": str(self.lease.term)}

    def joined(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in self._present() if node not in nodes]

    def dismiss(self, code: int, refusal: UserError | None = None) -> None:
        """Send the run's exit code, and the reason if any, to all nodes; wait a few seconds until they have left."""
        self._present()
        present = [node for node in self._remote.values() if not node.lost]
        for node in present:
            node.dismiss(code, refusal)
        until = time.monotonic() + DISMISS_SECONDS
        while time.monotonic() < until and any(not node.lost for node in present):
            time.sleep(POLL_SECONDS)

    def _left_out(self, nodes: Sequence[Node]) -> list[Node]:
        """Return those of `nodes` that are to be left out; none if too few would stay."""
        hosts, own = read_left_out(self._agent.run), platform.node()
        found = [node for node in nodes if getattr(node, "host", own) in hosts] if hosts else []
        if self._own_disk:  # the head has the run's records, and writes them as rank 0
            found = [node for node in found if node is not self._agent.node]
        return found if len(nodes) - len(found) >= self._agent.node_options.min_nodes else []

    def _present(self) -> list[Node]:
        """Return the nodes to start ranks on: those that are connected, without those that are left out."""
        connected = self._connected()
        left_out = self._left_out(connected)
        return [node for node in connected if node not in left_out]

    def _connected(self) -> list[Node]:
        """Return this node and those connected to it, in the order of their ranks; at most as many as are needed."""
        for name, mailbox in list(self._agent.channel.mailboxes.items()):
            known = self._remote.get(name)
            if (known is None or known.mailbox is not mailbox) and mailbox.inbox:
                self._greet(name, mailbox, mailbox.inbox.popleft())
        for name in [each for each, node in self._remote.items() if node.lost]:
            self._unfit.pop(name, None)
        present: list[Node] = [self._agent.node]
        present += [node for node in self._remote.values() if not node.lost and not node.leaving]
        fit = [node for node in present if node.name not in self._unfit and node.name not in self._turned_away]
        order = order_nodes({node.name: self._above(node.name) for node in fit}, first=self._first)
        return sorted(fit, key=lambda node: order.index(node.name))[: self._agent.node_options.nodes]

    def _greet(self, name: str, mailbox: Mailbox, hello: Record) -> None:
        """Add a node that has connected. If the run cannot work there and has already started, it is turned away."""
        node = RemoteNode(self._agent.run, name, mailbox, num_ranks=int(hello["num_ranks"]), own_disk=self._own_disk)
        node.host, node.channel_address = str(hello.get("host", name)), str(hello.get("channel", ""))
        self._remote[name] = node
        self._switches[name] = tuple(map(str, hello.get("switches", ())))
        skew = float(hello["time"]) - mailbox.begun
        if abs(skew) > SKEW_SECONDS:  # logs of both nodes are then hard to compare
            side = "ahead" if skew > 0 else "behind"
            what = f"the clock of {name} is {abs(skew):.0f} s {side}; nothing depends on it"
            log.warning(what)
            self._num_skewed += 1
            if self._num_skewed <= MAX_SKEW_INCIDENTS:  # it may be our clock that differs from those of 1,000 nodes
                IncidentLog(self._agent.run).notice("host", what, action="continued", evidence={"skew_seconds": skew})
        self._unfit.pop(name, None)
        self._turned_away.discard(name)
        if "unfit" not in hello:
            return
        error = UserError(**hello["unfit"])
        log.error("%s", error)
        note_unfit_node(self._agent.run, node.host, error)
        if self._formed:
            self._turned_away.add(name)
            node.dismiss(EXIT_USER, error)
        else:
            self._unfit[name] = error

    def _above(self, name: str) -> Sequence[str]:
        """Return the switches above a node or, if no node's are known, its groups by measured links."""
        return self._switches[name] if any(self._switches.values()) else self._groups.get(name, ())


def join_refusals(unfit: Mapping[str, UserError]) -> UserError:
    """Return one error for all nodes that the run cannot work on. Nodes with the same error are named together."""
    first = unfit[min(unfit)]
    alike = [name for name, each in sorted(unfit.items()) if (each.code, each.what) == (first.code, first.what)]
    others = [f"{name}: {each.code}, {each.what}" for name, each in sorted(unfit.items()) if name not in alike]
    where = f"node{'s' if alike[1:] else ''} {', '.join(alike)}"
    return UserError(first.code, "; ".join([first.what, *others]), where=where, fix=first.fix)

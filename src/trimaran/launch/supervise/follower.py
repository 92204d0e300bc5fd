"""This machine's part of a run on several machines, and what it does while another node coordinates the run."""

import logging
import os
import platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimaran.core import EXIT_AGAIN, Plan, UserError
from trimaran.launch.supervise.channel import EXCHANGE_SECONDS, SILENT_SECONDS, Channel
from trimaran.launch.supervise.early_supervisor import Signals
from trimaran.launch.supervise.fork_server_process import ForkServerProcess
from trimaran.launch.supervise.head_client import RUN_FILES, FileSender, HeadClient, answer_not_ready, write_run_files
from trimaran.launch.supervise.local_node import LocalNode
from trimaran.launch.supervise.measure_links import MEASURE_LINK, read_switches, serve_link, start_measuring
from trimaran.launch.supervise.next_attempt import cluster_of
from trimaran.launch.supervise.node import AttemptSpec
from trimaran.launch.supervise.node_options import NodeOptions, split_head
from trimaran.launch.supervise.rank_report import show_ranks
from trimaran.launch.supervise.remote_node import record_of_event, record_of_heartbeat
from trimaran.launch.supervise.side_processes import PreflightProcess
from trimaran.runs import ChannelClient, LeaseHolder, LeaseWatch, LinkSpeed, Record, RunDirectory, run_token
from trimaran.runs.rank_environment import without_unusable, worker_environment

log = logging.getLogger(__name__)


class NodeAgent:
    """Lives as long as this machine takes part, as coordinator or follower: the rank memories outlive role changes.

    Make it in the thread that stays to the end, see `LocalNode`. `check`: check whether the run can work here.
    """

    def __init__(
        self,
        run: RunDirectory,
        node_options: NodeOptions,
        *,
        check: bool = True,
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self.run, self.node_options = run, node_options
        self.token, self.recipe = run_token(run), run.read_recipe()
        plan, interface = run.read_plan(), node_options.interface
        device = cluster_of(self.recipe, plan.mesh.world_size).device
        self.kind, self._on_cpu = device.kind, device.traits.shares_cores
        num_ranks = node_options.ranks or -(-plan.mesh.world_size // node_options.num_at_start)
        nodes, where = -(-plan.mesh.world_size // num_ranks), f"node {node_options.name}"
        self.preflight = PreflightProcess(run, kind=self.kind, nodes=nodes, where=where) if check else None
        ours = {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        }
        self.per_node, given = frozenset(ours), without_unusable(os.environ)
        self.is_head = node_options.own_disk and node_options.is_head
        port = split_head(node_options.head)[1] if self.is_head else 0
        self.channel = Channel(node_options.address, self.token, port=port, own_node=node_options.name)
        self.channel.streams[MEASURE_LINK] = serve_link
        if self.is_head:
            self.channel.operations[RUN_FILES] = answer_not_ready
        alone = {"TRIMARAN_OWN_DISK": node_options.name} if node_options.own_disk else {}
        self.node = LocalNode(
            run,
            num_ranks=num_ranks,
            environment={
                **(os.environ | self.environment(plan)),
                **{name: given.get(name, ours[name]) for name in ours},
                **alone,
            },
            faults=self.recipe.faults,
            name=node_options.name,
            fork_server=fork_server,
        )

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return the variables of the ranks of `plan` on top of our environment."""
        deterministic, debug = self.recipe.train.deterministic, self.recipe.faults.debug
        return worker_environment(os.environ, plan, on_cpu=self._on_cpu, deterministic=deterministic, debug=debug)

    def close(self) -> None:
        if self.preflight is not None:
            self.preflight.cancel()
        self.node.close()
        self.channel.close()


POLL_SECONDS = 0.02
MAX_WAITING_MESSAGES = 5  # that may all have pieces of files: one exchange takes them together

LEASE_SECONDS = 1.0  # between looks at the lease, which is on a disk that all nodes share


class CoordinatorClient:
    """Exchanges messages with the coordinator in its own thread, whatever the node's main thread is doing.

    `lost` says why no more messages can be exchanged; empty while they can. `connected` is True after the first
    exchange. `name_taken`: another node takes part under our name. `seconds`: how often the coordinator wants to hear
    from us at least; what we send in between is sent at once.
    """

    def __init__(self, address: str, token: str, name: str) -> None:
        self.lost, self.connected, self.name_taken = "", False, False
        self.seconds = EXCHANGE_SECONDS
        self._address, self._token, self._name = address, token, name
        self._session = secrets.token_hex(8)
        self._in: deque[Record] = deque()
        self._out: deque[Record] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="coordinator-client", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> None:
        self._out.append(message)

    @property
    def num_waiting(self) -> int:
        return len(self._out)

    def received(self) -> list[Record]:
        return [self._in.popleft() for _ in range(len(self._in))]

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=SILENT_SECONDS)

    def _exchange(self) -> None:
        due = 0.0
        try:
            with ChannelClient(self._address, self._token, seconds=SILENT_SECONDS) as client:
                while not self._over.wait(EXCHANGE_SECONDS if self.connected else 0.0):
                    if not self._out and time.monotonic() < due:
                        continue
                    messages = [self._out.popleft() for _ in range(len(self._out))]
                    request = {"op": "exchange", "node": self._name, "session": self._session, "messages": messages}
                    answer = client.request(request, seconds=SILENT_SECONDS)
                    self.name_taken = "error" in answer
                    if self.name_taken:
                        raise ConnectionRefusedError(answer["error"])
                    self._in.extend(answer["messages"])
                    self.seconds = min(SILENT_SECONDS / 4, float(answer.get("seconds", EXCHANGE_SECONDS)))
                    due = time.monotonic() + self.seconds - EXCHANGE_SECONDS / 2
                    self.connected = True
        except TimeoutError:
            self.lost = f"no message over the connection to {self._address} for {SILENT_SECONDS:g} s"
        except OSError as error:
            self.lost = f"the connection to {self._address} broke: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerEnd:
    """How following a coordinator ended."""

    code: int | None = None  # of the run; if None, `why` says how it ended
    refusal: UserError | None = None  # why the run cannot work on some node
    why: str = ""
    connected: bool = False  # there was any contact
    ranks_killed: bool = False  # ranks were running; they were killed
    name_taken: bool = False  # another node takes part under our name


class Follower:
    """Executes the commands of the coordinator, `holder`, on this machine's node.

    Use it in the thread that made the node. `unfit` is why the run cannot work on this machine; the coordinator decides
    what follows from that. `files` sends the files of this node, if it has a run directory of its own.
    """

    def __init__(
        self,
        agent: NodeAgent,
        holder: LeaseHolder,
        *,
        unfit: UserError | None = None,
        files: FileSender | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.run, self.node, self.holder = agent.run, agent.node, holder
        self._token, self._channel, self._files = agent.token, agent.channel, files
        self._coordinator = CoordinatorClient(holder.address, self._token, self.node.name)
        about: Record = {"num_ranks": self.node.num_ranks, "time": wall_clock(), "host": platform.node()}
        error = {"unfit": unfit.as_dict()} if unfit else {}
        about |= {"channel": agent.channel.address}
        self._coordinator.send(**about, switches=read_switches(os.environ), **error)
        self._refusal: UserError | None = None
        self._ranks_running, self._stop_sent = False, False
        self._measures_speed = False
        self._store = ""  # of the running ranks
        self._heartbeats_due = self._lease_due = 0.0
        self._end: int | None = None

    def wait_until_connected(self, signals: Signals) -> bool:
        """Wait until the coordinator answers; return False if it does not, or a stop is requested."""
        while not self._coordinator.connected and not self._coordinator.lost and not signals.stop_requested:
            time.sleep(POLL_SECONDS)
        return self._coordinator.connected

    def follow(self, watch: LeaseWatch | HeadClient, signals: Signals) -> FollowerEnd:
        """Execute commands until the run is over, the coordinator is lost, or `watch` names another one."""
        try:
            while (end := self._poll(watch, signals)) is None:
                time.sleep(POLL_SECONDS)
            if end.code is None:
                self.node.kill()  # at once: without a coordinator the ranks must not continue
            return end
        finally:
            self._coordinator.close()
            self._channel.end_relay()

    def _poll(self, watch: LeaseWatch | HeadClient, signals: Signals) -> FollowerEnd | None:
        for command in self._coordinator.received():
            self._execute(command)
        self._report()
        if self._end is not None:
            return FollowerEnd(code=self._end, refusal=self._refusal, connected=True)
        if signals.kill_requested or (signals.stop_requested and not self._ranks_running):
            self.node.kill()
            code = signals.exit_code if self._ranks_running else EXIT_AGAIN
            return FollowerEnd(code=code, connected=self._coordinator.connected)
        if signals.stop_requested and not self._stop_sent:
            self._stop_sent = True
            self._coordinator.send(leaving=True)  # it asks all ranks to stop, and continues without us if it can
        if signals.show_requested:
            signals.show_requested = False
            # Show the ranks of this node. The coordinator shows those of all nodes.
            if self._ranks_running:
                show_ranks(self.run, [self.node], sorted(self.node.heartbeats()), of=self.node.name)
            else:
                log.info("no rank is running on this node")
        if self._coordinator.lost:
            return self._lose(self._coordinator.lost)
        if time.monotonic() < self._lease_due:
            return None
        self._lease_due = time.monotonic() + LEASE_SECONDS
        newest = watch.poll()
        if newest != self.holder and (isinstance(newest, int) or newest.term > self.holder.term):
            return self._lose("the coordinator's lease is over")
        return None

    def _lose(self, why: str) -> FollowerEnd:
        return FollowerEnd(
            why=why,
            connected=self._coordinator.connected,
            ranks_killed=self._ranks_running,
            name_taken=self._coordinator.name_taken,
        )

    def _report(self) -> None:
        if not self._ranks_running:
            if self._measures_speed and (speed := self.node.take_speed()) is not None:
                self._measures_speed = False
                self._coordinator.send(speed=speed)
            return
        now = time.monotonic()
        events = [record_of_event(each, now) for each in self.node.poll()]
        if events or now >= self._heartbeats_due:
            self._send_files(at_once=bool(events))  # first: the coordinator reads what a rank wrote before it ended
            self._heartbeats_due = now + self._coordinator.seconds
            heartbeats = {
                str(rank): record_of_heartbeat(heartbeat, now) for rank, heartbeat in self.node.heartbeats().items()
            }
            self._coordinator.send(events=events, heartbeats=heartbeats, clock=now)

    def _send_files(self, *, at_once: bool) -> None:
        """Send what is new in the files of this node; unless `at_once`, only if earlier messages have been sent."""
        if self._files is None or (not at_once and self._coordinator.num_waiting > MAX_WAITING_MESSAGES):
            return
        while pieces := self._files.pieces(is_last=not self._ranks_running):
            self._coordinator.send(files=pieces)
            if not at_once or self._coordinator.num_waiting > MAX_WAITING_MESSAGES:
                return

    def _relayed(self, spec: AttemptSpec) -> AttemptSpec:
        """Return `spec` with our channel as the store, which relays requests to the coordinator's."""
        # If the coordinator cannot be reached for that now, the ranks ask it themselves, which takes them longer to
        # join.
        try:
            client = ChannelClient(spec.store, self._token, seconds=SILENT_SECONDS)
        except (OSError, ValueError) as error:
            log.warning("no relay to %s: %s; each rank connects to it", spec.store, error)
            return spec
        self._channel.relay_to(client, attempt=spec.attempt)
        return replace(spec, store=self._channel.address)

    def _send_link(self, peer: str, link: LinkSpeed | None) -> None:
        self._coordinator.send(link={"peer": peer} | (asdict(link) if link else {}))

    def _execute(self, command: Record) -> None:
        match command["command"]:
            case "start":
                self._ranks_running, self._heartbeats_due = True, 0.0
                if "files" in command:
                    write_run_files(self.run, command["files"])
                spec = self._relayed(AttemptSpec(**command["spec"] | {"token": self._token}))
                self._store = spec.store
                self.node.start(spec)
            case "start_ranks":
                spec = AttemptSpec(**command["spec"] | {"token": self._token})
                if not self._ranks_running:
                    self._ranks_running, self._heartbeats_due = True, 0.0
                    self._store = self._relayed(spec).store
                self.node.start_ranks(replace(spec, store=self._store), command["ranks"])
            case "kill_ranks":
                self.node.kill_ranks(command["ranks"])
            case "collect_reports":
                how = {key: command[key] for key in ("seconds", "gently") if key in command}
                self.node.collect_reports(self.run.path / command["folder"], **how)
            case "measure_link":
                link = {"seconds": command["seconds"], "then": self._send_link}
                start_measuring(command["peer"], command["address"], self._token, **link)
            case "measure_speed":
                self.node.begin_speed(command["kind"], seconds=command["seconds"])
                self._measures_speed = True
            case "stop":
                self.node.request_stop()
            case "leave":
                self.node.request_leave()
            case "kill":
                self.node.kill()
                self._ranks_running = False
            case "end":
                self._end, refusal = command["code"], command.get("refusal")
                self._refusal = refusal and UserError(**refusal)
        self._send_files(at_once=True)
        self._coordinator.send(executed=command["number"])

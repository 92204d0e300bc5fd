"""Ranks and nodes on the run's channel, and nodes that lose the coordinator."""

import contextlib
import multiprocessing
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.fault.harness import start_module
from tests.ranks import run_ranks
from trimaran.core import Recipe, UserError
from trimaran.launch import (
    AttemptSpec,
    Channel,
    FencedError,
    Follower,
    FollowerEnd,
    NodeAgent,
    NodeEvent,
    NodeLost,
    NodeOptions,
    RankEnded,
    RemoteNode,
    RemoteNodeGroup,
    Signals,
)
from trimaran.runs import (
    Heartbeat,
    LeaseWatch,
    RunDirectory,
    claim_term,
    read_holder,
    read_incidents,
    run_token,
    split_address,
    take_lease,
)
from trimaran.train import RankInfo, SupervisorLink, TokenStore, join_process_group

WAIT_SECONDS = 300.0


def until(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class FakeNode:
    """A node without processes that records its calls, with the events that a test sets."""

    warm = True

    def __init__(self, name: str = "b", num_ranks: int = 2) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.calls: list[str] = []
        self.spec: AttemptSpec | None = None
        self.events: list[NodeEvent] = []
        self.current: dict[int, Heartbeat] = {}

    def start(self, spec: AttemptSpec) -> None:
        self.spec = spec
        self.calls.append("start")

    def poll(self) -> list[NodeEvent]:
        events, self.events = self.events, []
        return events

    def heartbeats(self) -> dict[int, Heartbeat]:
        return self.current

    def collect_reports(self, folder: Path, *, seconds: float) -> None:
        time.sleep(0.1)
        self.calls.append(f"collect_reports {folder.name} {seconds:g}")

    def request_stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")

    def begin_speed(self, kind: str, *, seconds: float) -> None:
        self.calls.append(f"measure {kind}")

    def take_speed(self) -> float | None:
        return None


class FollowerThread:
    """A follower in its own thread, as if on another machine."""

    def __init__(
        self,
        run: RunDirectory,
        node: FakeNode,
        *,
        unfit: UserError | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        holder = read_holder(run)
        assert holder is not None
        self.node, self.signals = node, Signals()
        self.end: FollowerEnd | None = None
        self.channel = Channel("127.0.0.1", run_token(run), own_node=node.name)
        agent: Any = SimpleNamespace(run=run, node=node, token=run_token(run), channel=self.channel)
        self._follower = Follower(agent, holder, unfit=unfit, wall_clock=wall_clock)
        self.thread = threading.Thread(target=self._follow, args=(run,), daemon=True)
        self.thread.start()

    def _follow(self, run: RunDirectory) -> None:
        self.end = self._follower.follow(LeaseWatch(run), self.signals)
        self.channel.close()

    @property
    def connected(self) -> bool:
        """Whether the coordinator has taken the node's first message."""
        return not self.thread.is_alive() or self._follower.wait_until_connected(self.signals)

    def leave(self) -> None:
        """Ask the node to stop, and return when it has left."""
        self.signals.stop_requested = self.signals.kill_requested = True
        self.thread.join(WAIT_SECONDS)
        assert self.end is not None


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def channel(run: RunDirectory) -> Iterator[Channel]:
    made = Channel("127.0.0.1", run_token(run), own_node="a")
    with take_lease(run, address=made.address):
        yield made
    made.close()


class Wire:
    """A relay in front of a channel. Once it is cut, nothing passes, and no side closes its connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._ends = list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        for each in (self._listener, *self._ends):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours = self._listener.accept()[0], socket.create_connection(split_address(self._address))
                self._ends += ours
                for source, target in (ours, ours[::-1]):
                    threading.Thread(target=self._relay, args=(source, target), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._is_cut.is_set():
                    return
                target.sendall(data)
            target.close()


def join_node(run: RunDirectory, channel: Channel, node: FakeNode) -> tuple[FollowerThread, RemoteNode]:
    """Return both sides of a node that has joined."""
    follower = FollowerThread(run, node)
    until(lambda: node.name in channel.mailboxes and channel.mailboxes[node.name].inbox)
    mailbox = channel.mailboxes[node.name]
    assert mailbox.inbox.popleft()["num_ranks"] == node.num_ranks
    return follower, RemoteNode(run, node.name, mailbox, num_ranks=node.num_ranks)


def attempt_spec(attempt: int = 0) -> AttemptSpec:
    return AttemptSpec(attempt=attempt, first_rank=2, num_ranks=2, world_size=4, store="s:1", token="t",
                  environment={"A": "b"})  # fmt: skip


def all_reduce_over_the_channel(address: str, token: str) -> list[float]:
    place = RankInfo(
        rank=int(os.environ["RANK"]), world_size=4, local_rank=int(os.environ["RANK"]), device=torch.device("cpu")
    )
    join_process_group(place, SupervisorLink(store=address, token=token))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name in ("dp", "tp"):
        number = torch.tensor([float(place.rank)])
        dist.all_reduce(number, group=mesh[name].get_group())
        found.append(number.item())
    dist.destroy_process_group()
    return found


def serve_among_unauthenticated_clients(pipe: Connection, token: str) -> None:
    """Serve a channel while clients without the token keep connecting; at the end send how many were refused.

    It is a process of its own: ranks forked beside busy threads can inherit a locked mutex.
    """
    channel, clients = Channel("127.0.0.1", token), deque[socket.socket](maxlen=500)
    pipe.send(channel.address)
    while not pipe.poll(0.001):
        clients.append(socket.create_connection(split_address(channel.address)))
        clients[-1].send(b"hello\n")
    pipe.send(dict(channel.refused))


def test_ranks_join_over_the_channel_while_other_clients_flood_it() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_among_unauthenticated_clients, args=(theirs, "the token"))
    server.start()
    try:
        assert run_ranks(4, all_reduce_over_the_channel, ours.recv(), "the token", timeout=WAIT_SECONDS) == [
            [2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]
        ]  # fmt: skip
        ours.send("stop")
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv()["malformed"] > 50
    finally:
        server.kill()
        server.join()


def test_a_second_supervisor_of_a_run_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "trimaran-run.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    run.recipe.write_text("cluster: 2xcpu\n")
    run.plan.write_text('{"plan": {"mesh": {"dp_replicate": 2}}}')
    with take_lease(run):
        with (tmp_path / "second.log").open("wb") as output:
            second = start_module("trimaran.launch", str(tmp_path), output=output)
        assert second.wait(WAIT_SECONDS) == 2
        holder = read_holder(run)
    assert holder is not None
    said = f"S020: this run is already running: run {holder.run}, process {os.getpid()} on"
    assert said in (tmp_path / "second.log").read_text()


def test_commands_reach_a_node_and_its_events_come_back_in_our_clock(run: RunDirectory, channel: Channel) -> None:
    follower, remote = join_node(run, channel, FakeNode())
    began = time.monotonic()
    remote.start(attempt_spec())
    until(lambda: follower.node.calls == ["start"])
    assert follower.node.spec == replace(attempt_spec(), token=run_token(run))  # which was not sent
    now = time.monotonic()
    follower.node.current = {2: Heartbeat(section="step", step=7, entered=now - 100.0, alive=now, answered=0)}
    follower.node.events = [RankEnded(rank=3, code=-9, time=now - 2.0)]
    events: list[NodeEvent] = []
    until(lambda: events.extend(remote.poll()) or (events and remote.heartbeats()))
    (ended,) = events
    assert isinstance(ended, RankEnded)
    assert (ended.rank, ended.code) == (3, -9)
    late = [ended.time - (now - 2.0), remote.heartbeats()[2].entered - (now - 100.0)]
    assert all(-0.001 < each < time.monotonic() - began for each in late), "by the time of a message at most"
    remote.collect_reports(run.path / "incidents" / "i-0001", seconds=1.0)
    assert follower.node.calls[-1] == "collect_reports i-0001 1"  # done when the call returns
    remote.request_stop()
    remote.kill()
    assert follower.node.calls[-2:] == ["stop", "kill"]
    remote.dismiss(75)
    follower.thread.join(WAIT_SECONDS)
    assert follower.end is not None
    assert follower.end.code == 75


def test_the_ranks_of_a_node_ask_its_own_channel_which_relays_to_the_coordinator(
    run: RunDirectory, channel: Channel
) -> None:
    follower, remote = join_node(run, channel, FakeNode())
    for attempt in range(2):
        remote.start(replace(attempt_spec(attempt), store=channel.address))
        until(lambda: follower.node.calls == ["start"])
        assert follower.node.spec is not None
        assert follower.node.spec.store == follower.channel.address
        TokenStore(follower.node.spec.store, run_token(run), attempt=attempt).set("k", "v")
        assert TokenStore(channel.address, run_token(run), attempt=attempt).get("k") == b"v"
        remote.kill()
        follower.node.calls.clear()
    remote.dismiss(0)
    until(lambda: follower.end is not None)


def test_a_silent_node_is_lost_on_both_sides(run: RunDirectory, tmp_path: Path) -> None:
    """Packets vanish, and no side closes the connection."""
    channel = Channel("127.0.0.1", run_token(run), own_node="a")
    wire = Wire(channel.address)
    with take_lease(run, address=wire.address):
        follower, remote = join_node(run, channel, FakeNode())
        remote.start(attempt_spec())
        until(lambda: follower.node.calls == ["start"])
        wire.cut()
        assert_lost_on_both_sides(follower, remote)
    wire.close()
    channel.close()


def assert_lost_on_both_sides(follower: "FollowerThread", remote: RemoteNode) -> None:
    events: list[NodeEvent] = []
    until(lambda: events.extend(remote.poll()) or events)
    (lost,) = events
    assert isinstance(lost, NodeLost)
    assert (lost.node, lost.ranks) == ("b", (2, 3))
    assert "connection" in lost.what  # which makes `network` its cause
    assert remote.poll() == []
    remote.kill()  # returns although no node receives it
    follower.thread.join(WAIT_SECONDS)
    assert follower.node.calls == ["start", "kill"]
    assert follower.end == FollowerEnd(why=follower.end.why if follower.end else "", connected=True, ranks_killed=True)


def test_a_node_whose_supervisor_dies_is_lost_at_once(run: RunDirectory, channel: Channel) -> None:
    follower, remote = join_node(run, channel, FakeNode())
    follower.signals.stop_requested = True  # no ranks are running, so it exits
    follower.thread.join(WAIT_SECONDS)
    assert follower.end is not None
    assert follower.end.code == 75
    until(lambda: remote.lost)
    assert remote.lost == "its supervisor is gone"


def test_a_node_that_counts_as_lost_and_goes_on_has_to_connect_anew(run: RunDirectory, channel: Channel) -> None:
    """Its machine was suspended, so that it has not noticed its own silence."""
    follower, remote = join_node(run, channel, FakeNode())
    remote.start(attempt_spec())
    until(lambda: follower.node.calls == ["start"])
    channel.mailboxes["b"].given_up = True
    follower.thread.join(WAIT_SECONDS)
    assert follower.node.calls == ["start", "kill"]
    assert follower.end is not None
    assert (follower.end.code, follower.end.connected, follower.end.ranks_killed) == (None, True, True)


def test_a_follower_leaves_a_coordinator_whose_lease_is_over(run: RunDirectory, channel: Channel) -> None:
    follower, remote = join_node(run, channel, FakeNode())
    remote.start(attempt_spec())
    until(lambda: follower.node.calls == ["start"])
    newer = claim_term(run, 2, address="127.0.0.1:1")
    follower.thread.join(WAIT_SECONDS)
    assert follower.node.calls == ["start", "kill"]
    assert newer is not None
    newer.release()


def test_a_second_supervisor_of_a_node_is_turned_away(run: RunDirectory, channel: Channel) -> None:
    """Also one with the name of the coordinator's own node, `a`."""
    first, remote = join_node(run, channel, FakeNode("b"))
    for name in ("b", "a"):
        second = FollowerThread(run, FakeNode(name))
        second.thread.join(WAIT_SECONDS)
        assert second.end is not None
        assert (second.end.name_taken, second.end.connected) == (True, False)
    assert not remote.lost
    first.signals.stop_requested = True
    first.thread.join(WAIT_SECONDS)


class FakeAgent:
    """The coordinator's own part of a run: node `a` with one rank."""

    def __init__(self, run: RunDirectory, channel: Channel, node_options: NodeOptions, recipe: Recipe) -> None:
        self.run, self.channel, self.node_options, self.recipe = run, channel, node_options, recipe
        self.token, self.node, self.per_node, self.kind = run_token(run), FakeNode("a", 1), frozenset(), "cpu"


def node_group(
    run: RunDirectory,
    channel: Channel,
    *,
    nodes: int = 2,
    min_nodes: int,
    start_nodes: int = 0,
    wait_seconds: float = WAIT_SECONDS,
    recipe: Recipe | None = None,
) -> RemoteNodeGroup:
    node_options = NodeOptions(nodes=nodes, min_nodes=min_nodes, start_nodes=start_nodes, address="127.0.0.1",
                               wait_seconds=wait_seconds)  # fmt: skip
    lease = claim_term(run, 2, address=channel.address, shared=True)
    assert lease is not None
    agent = FakeAgent(run, channel, node_options, recipe or Recipe())
    return RemoteNodeGroup(cast(NodeAgent, agent), lease, Signals(), formed=False)


def present(group: RemoteNodeGroup) -> list[str]:
    """Return the names of the nodes to start ranks on."""
    return [node.name for node in group.joined([])]


def test_the_coordinator_waits_for_all_nodes_and_later_continues_with_the_minimum(
    run: RunDirectory, channel: Channel
) -> None:
    group = node_group(run, channel, min_nodes=1)
    first = FollowerThread(run, FakeNode("b", 2))
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b"]
    assert group.growth(nodes) is None
    first.signals.stop_requested = first.signals.kill_requested = True
    first.thread.join(WAIT_SECONDS)
    until(lambda: [node.name for node in group.wait_for_nodes() or []] == ["a"])
    again = FollowerThread(run, FakeNode("b", 2))
    until(lambda: group.growth(nodes[:1]) == 3)
    again.signals.stop_requested = True
    again.thread.join(WAIT_SECONDS)


def test_a_start_waits_only_for_the_nodes_asked_for_and_a_node_that_leaves_counts_no_more(
    run: RunDirectory, channel: Channel
) -> None:
    group = node_group(run, channel, nodes=3, min_nodes=1, start_nodes=2, wait_seconds=1e6)
    follower = FollowerThread(run, FakeNode("b", 2))
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b"]
    nodes[1].start(AttemptSpec(attempt=0, first_rank=1, num_ranks=2, world_size=3, store="", token=""))
    until(lambda: follower.node.calls == ["start"])
    assert group.leaving(nodes) == []
    follower.signals.stop_requested = True
    until(lambda: group.leaving(nodes) == ["b"])
    assert follower.node.calls == ["start"], "the coordinator decides when the ranks stop"
    assert group.can_go_on()
    assert group.growth(nodes[:1]) is None
    nodes[1].kill()
    follower.thread.join(WAIT_SECONDS)
    assert follower.end is not None
    assert follower.end.code == 75


def test_ranks_are_numbered_by_switch(run: RunDirectory, channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMARAN_TOPOLOGY", "spine.leaf2")
    group = node_group(run, channel, min_nodes=2)  # node a
    monkeypatch.setenv("TRIMARAN_TOPOLOGY", "spine.leaf1")
    follower = FollowerThread(run, FakeNode("b", 2))
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["b", "a"]
    follower.signals.stop_requested = follower.signals.kill_requested = True
    follower.thread.join(WAIT_SECONDS)


def test_too_few_nodes_give_none_after_the_wait(run: RunDirectory, channel: Channel) -> None:
    assert node_group(run, channel, min_nodes=2, wait_seconds=0.3).wait_for_nodes() is None


def test_a_coordinator_without_its_lease_starts_nothing(run: RunDirectory, channel: Channel) -> None:
    group = node_group(run, channel, min_nodes=1)
    newer = claim_term(run, 3)
    assert newer is not None
    until(lambda: not group.lease.holds())
    with pytest.raises(FencedError):
        group.wait_for_nodes()
    newer.release()


def test_a_node_with_another_clock_is_reported_and_used(run: RunDirectory, channel: Channel) -> None:
    group = node_group(run, channel, min_nodes=2)
    follower = FollowerThread(run, FakeNode("b", 2), wall_clock=lambda: time.time() - 60.0)
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert len(nodes) == 2
    (incident,) = read_incidents(run)
    assert (incident.cause, incident.action) == ("host", "continued")
    assert re.search(r"the clock of b is [67]\d s behind", incident.what)
    follower.signals.stop_requested = True
    follower.thread.join(WAIT_SECONDS)

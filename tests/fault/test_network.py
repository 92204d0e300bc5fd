"""Ranks and nodes meet over the run's channel, strangers or not; who loses the others stops."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.launch import channel as channel_module
from trimaran.launch import follower as member_module
from trimaran.launch import node_fleet
from trimaran.launch import remote_node as remote_node_module
from trimaran.launch.channel import Channel
from trimaran.launch.follower import Follower, FollowerEnd
from trimaran.launch.local_node import LocalNode
from trimaran.launch.node import Ended, Lost, News, Orders
from trimaran.launch.node_agent import NodeAgent
from trimaran.launch.node_fleet import FencedError, RemoteNodeGroup
from trimaran.launch.node_options import NodeOptions
from trimaran.launch.remote_node import RemoteNode
from trimaran.launch.signals import Signals
from trimaran.run import Heartbeat, RunDirectory, read_incidents
from trimaran.run.lease import LeaseWatch, claim, read_holder, take, token_of
from trimaran.run.wire import split_address
from trimaran.train.process.rank_info import RankInfo, join
from trimaran.train.process.supervisor_link import SupervisorLink

WAIT = 10.0


def until(condition: Callable[[], Any], seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class FakeNode:
    """A node without processes; tells what it was told, and what the test wants it to tell."""

    warm = True

    def __init__(self, name: str = "b", num_ranks: int = 2) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.told: list[str] = []
        self.orders: Orders | None = None
        self.coming: list[News] = []
        self.beating: dict[int, Heartbeat] = {}

    def start(self, orders: Orders) -> None:
        self.orders = orders
        self.told.append("start")

    def news(self) -> list[News]:
        found, self.coming = self.coming, []
        return found

    def heartbeats(self) -> dict[int, Heartbeat]:
        return self.beating

    def collect_reports(self, folder: Path, *, seconds: float) -> None:
        time.sleep(0.1)
        self.told.append(f"collect_reports {folder.name} {seconds:g}")

    def ask_to_stop(self) -> None:
        self.told.append("stop")

    def kill(self) -> None:
        self.told.append("kill")


class Under:
    """A member that serves in a thread of its own, as if on another machine."""

    def __init__(self, run: RunDirectory, node: FakeNode) -> None:
        holder = read_holder(run)
        assert holder is not None
        self.node, self.signals = node, Signals()
        self.parting: FollowerEnd | None = None
        self._member = Follower(run, cast(LocalNode, node), holder, token_of(run))
        self.thread = threading.Thread(target=self._serve, args=(run,), daemon=True)
        self.thread.start()

    def _serve(self, run: RunDirectory) -> None:
        self.parting = self._member.serve(LeaseWatch(run), self.signals)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def channel(run: RunDirectory) -> Iterator[Channel]:
    made = Channel("127.0.0.1", token_of(run), own_node="a")
    with take(run, address=made.address):
        yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a long time."""
    for module in (channel_module, remote_node_module, member_module):
        monkeypatch.setattr(module, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(node_fleet, "REGROUP_SECONDS", 0.2)


def meet(run: RunDirectory, channel: Channel, node: FakeNode) -> tuple[Under, RemoteNode]:
    """Return both sides of a node that has joined."""
    under = Under(run, node)
    until(lambda: node.name in channel.desks and channel.desks[node.name].inbox)
    mailbox = channel.desks[node.name]
    assert mailbox.inbox.popleft()["num_ranks"] == node.num_ranks
    return under, RemoteNode(run, node.name, mailbox, num_ranks=node.num_ranks)


def orders(attempt: int = 0) -> Orders:
    return Orders(attempt=attempt, first_rank=2, num_ranks=2, world_size=4, store="s:1", token="t",
                  environment={"A": "b"})  # fmt: skip


def reduce_among_strangers(address: str, token: str) -> list[float]:
    place = RankInfo(
        rank=int(os.environ["RANK"]), world_size=4, local_rank=int(os.environ["RANK"]), device=torch.device("cpu")
    )
    join(place, SupervisorLink(store=address, token=token))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name in ("dp", "tp"):
        number = torch.tensor([float(place.rank)])
        dist.all_reduce(number, group=mesh[name].get_group())
        found.append(number.item())
    dist.destroy_process_group()
    return found


def serve_in_a_crowd(pipe: Connection, token: str) -> None:
    """Serve a channel among strangers that come all the time, until told to tell how many were refused.

    A process of its own: ranks that are forked beside busy threads can get a lock that nobody will ever open.
    """
    channel, crowd = Channel("127.0.0.1", token), deque[socket.socket](maxlen=500)
    pipe.send(channel.address)
    while not pipe.poll(0.001):
        crowd.append(socket.create_connection(split_address(channel.address)))
        crowd[-1].send(b"let me in\n")
    pipe.send(dict(channel.refused))


def test_ranks_meet_over_the_channel_in_a_crowd_of_strangers() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_in_a_crowd, args=(theirs, "the token"))
    server.start()
    try:
        assert run_ranks(4, reduce_among_strangers, ours.recv(), "the token", timeout=60.0) == [
            [2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]
        ]  # fmt: skip
        ours.send("enough")
        assert ours.poll(WAIT)
        assert ours.recv()["garbage"] > 50
    finally:
        server.kill()
        server.join()


def test_a_second_supervisor_of_a_run_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "trimaran-run.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    run.recipe.write_text("cluster: 2xcpu\n")
    run.plan.write_text('{"plan": {"mesh": {"dp_replicate": 2}}}')
    with take(run):
        command = [sys.executable, "-m", "trimaran.launch", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"S020: this run is at work: run {read_holder(run).run}, process {os.getpid()} on" in second.stderr  # type: ignore[union-attr]


def test_orders_reach_a_node_and_its_news_come_back_by_our_clock(run: RunDirectory, channel: Channel) -> None:
    under, remote = meet(run, channel, FakeNode())
    remote.start(orders())
    until(lambda: under.node.told == ["start"])
    assert under.node.orders == orders()
    now = time.monotonic()
    under.node.beating = {2: Heartbeat(section="step", step=7, entered=now - 100.0, alive=now, answered=0)}
    under.node.coming = [Ended(rank=3, code=-9, time=now - 2.0)]
    news: list[News] = []
    until(lambda: news.extend(remote.news()) or (news and remote.heartbeats()))
    (ended,) = news
    assert isinstance(ended, Ended)
    assert (ended.rank, ended.code) == (3, -9)
    assert now - ended.time == pytest.approx(2.0, abs=1.0)
    assert now - remote.heartbeats()[2].entered == pytest.approx(100.0, abs=1.0)
    remote.collect_reports(run.path / "incidents" / "i-0001", seconds=1.0)
    assert under.node.told[-1] == "collect_reports i-0001 1"  # it has, when the call returns
    remote.ask_to_stop()
    remote.kill()
    assert under.node.told[-2:] == ["stop", "kill"]
    remote.dismiss(75)
    under.thread.join(WAIT)
    assert under.parting is not None
    assert under.parting.code == 75


@pytest.mark.usefixtures("quick")
def test_a_silent_node_is_lost_on_both_sides(
    run: RunDirectory, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wire is cut: packets vanish, and nobody hangs up."""
    under, remote = meet(run, channel, FakeNode())
    remote.start(orders())
    until(lambda: under.node.told == ["start"])
    monkeypatch.setattr(channel, "_answer", lambda connection, request: None)
    news: list[News] = []
    until(lambda: news.extend(remote.news()) or news, 5.0)
    (lost,) = news
    assert isinstance(lost, Lost)
    assert (lost.node, lost.ranks) == ("b", (2, 3))
    assert "connection" in lost.what  # which makes it the network's fault
    assert remote.news() == []
    remote.kill()  # returns, though nobody hears it
    under.thread.join(5.0)
    assert under.node.told == ["start", "kill"]
    assert under.parting == FollowerEnd(why=under.parting.why if under.parting else "", met=True, under_way=True)


def test_a_node_whose_supervisor_dies_is_lost_at_once(run: RunDirectory, channel: Channel) -> None:
    under, remote = meet(run, channel, FakeNode())
    under.signals.asked = True  # nothing is under way, so it leaves
    under.thread.join(5.0)
    assert under.parting is not None
    assert under.parting.code == 75
    until(lambda: remote.lost, 2.0)
    assert remote.lost == "its supervisor is gone"


def test_a_member_leaves_a_coordinator_whose_lease_is_over(run: RunDirectory, channel: Channel) -> None:
    under, remote = meet(run, channel, FakeNode())
    remote.start(orders())
    until(lambda: under.node.told == ["start"])
    newer = claim(run, 2, address="127.0.0.1:1")
    under.thread.join(5.0)
    assert under.node.told == ["start", "kill"]
    assert newer is not None
    newer.release()


def test_a_second_supervisor_of_a_node_is_turned_away(run: RunDirectory, channel: Channel) -> None:
    """Also one of the coordinator's own node, whose name is `a`."""
    first, remote = meet(run, channel, FakeNode("b"))
    for name in ("b", "a"):
        second = Under(run, FakeNode(name))
        second.thread.join(5.0)
        assert second.parting is not None
        assert (second.parting.taken, second.parting.met) == (True, False)
    assert not remote.lost
    first.signals.asked = True
    first.thread.join(WAIT)


class FakeCrew:
    def __init__(self, run: RunDirectory, channel: Channel, node_options: NodeOptions) -> None:
        self.run, self.channel, self.node_options, self.token = run, channel, node_options, token_of(run)
        self.node, self.per_node = FakeNode("a", 1), frozenset()


def fleet_of(run: RunDirectory, channel: Channel, *, min_nodes: int, wait_seconds: float = 20.0) -> RemoteNodeGroup:
    node_options = NodeOptions(nodes=2, min_nodes=min_nodes, address="127.0.0.1", wait_seconds=wait_seconds)
    lease = claim(run, 2, address=channel.address, shared=True)
    assert lease is not None
    return RemoteNodeGroup(cast(NodeAgent, FakeCrew(run, channel, node_options)), lease, Signals(), formed=False)


@pytest.mark.usefixtures("quick")
def test_the_coordinator_waits_for_all_and_later_goes_on_with_as_few_as_allowed(
    run: RunDirectory, channel: Channel
) -> None:
    fleet = fleet_of(run, channel, min_nodes=1)
    late = threading.Timer(0.5, lambda: joined.append(Under(run, FakeNode("b", 2))))
    joined: list[Under] = []
    late.start()
    nodes = fleet.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b"]
    assert fleet.growth(nodes) is None
    joined[0].signals.asked = joined[0].signals.urgent = True
    joined[0].thread.join(WAIT)
    until(lambda: [node.name for node in fleet.wait_for_nodes() or []] == ["a"])
    again = Under(run, FakeNode("b", 2))
    until(lambda: fleet.growth(nodes[:1]) == 3)
    again.signals.asked = True
    again.thread.join(WAIT)


def test_too_few_nodes_are_told_after_the_wait(run: RunDirectory, channel: Channel) -> None:
    assert fleet_of(run, channel, min_nodes=2, wait_seconds=0.3).wait_for_nodes() is None


def test_a_coordinator_without_its_lease_starts_nothing(run: RunDirectory, channel: Channel) -> None:
    fleet = fleet_of(run, channel, min_nodes=1)
    newer = claim(run, 3)
    assert newer is not None
    until(lambda: not fleet.holds())
    with pytest.raises(FencedError):
        fleet.wait_for_nodes()
    newer.release()


def test_a_clock_that_differs_is_mentioned_and_nothing_else(
    run: RunDirectory, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, real = fleet_of(run, channel, min_nodes=2), time.time
    monkeypatch.setattr(member_module.time, "time", lambda: real() - 60.0)
    under = Under(run, FakeNode("b", 2))
    monkeypatch.setattr(member_module.time, "time", real)
    nodes = fleet.wait_for_nodes()
    assert nodes is not None
    assert len(nodes) == 2
    (said,) = read_incidents(run)
    assert (said.cause, said.action) == ("host", "continued")
    assert "the clock of b is 60 s behind" in said.what
    under.signals.asked = True
    under.thread.join(WAIT)

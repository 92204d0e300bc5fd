"""Nodes that are left out are measured while they are idle, from the coordinator to a fork of their fork server."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.harness import wait_for
from tests.fault.test_network import FakeNode, FollowerThread, node_group, present
from trimaran.core import FaultsSection, Plan, Recipe
from trimaran.launch import Channel, LeftOutWatch, LocalNode
from trimaran.runs import RunDirectory, create_run, read_node_speeds, run_token, take_lease, write_left_out


class FakeIdleNode(FakeNode):
    """A node whose speed a test sets; it answers at once."""

    speed = 1.0

    def take_speed(self) -> float | None:
        if self.calls[-1:] != ["measure cpu"]:
            return None
        self.calls.append("answered")
        return self.speed


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    run = RunDirectory(tmp_path)
    made = Channel("127.0.0.1", run_token(run), own_node="a")
    with take_lease(run, address=made.address):
        yield made
    made.close()


def test_measurements_become_rarer_until_one_shows_a_faster_node(tmp_path: Path) -> None:
    clock, node = [0.0], FakeIdleNode()
    watch = LeftOutWatch(RunDirectory(tmp_path), "cpu", clock=lambda: clock[0])

    def times_until(end: float) -> list[float]:
        """Return when the node was measured."""
        found = []
        while clock[0] < end:
            before = node.calls.count("measure cpu")
            watch.poll({"b": node})
            found += [clock[0]] * (node.calls.count("measure cpu") - before)
            clock[0] += 1.0
        return found

    assert times_until(200.0) == [0.0, 11.0, 32.0, 73.0, 154.0]
    assert times_until(7000.0)[-1] - 6000.0 > 0, "it never stops"
    node.speed = 8.0
    first, second = times_until(8000.0)[:2]
    assert second - first < 15, "it is confirmed soon"
    speeds = read_node_speeds(RunDirectory(tmp_path))["b"]
    assert speeds[0] == 1.0
    assert speeds[-1] == 8.0
    watch.poll({})
    assert read_node_speeds(RunDirectory(tmp_path)) == {}, "it is compared with its speed when it is left out again"


def test_the_coordinator_measures_a_node_that_is_left_out(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, min_nodes=1)
    node = FakeIdleNode("b", 1)
    follower = FollowerThread(run, node)
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert len(nodes) == 2
    assert group.growth(nodes) is None
    assert node.calls == [], "a node that takes part is not measured"
    nodes[1].host = "host-b"  # type: ignore[attr-defined]
    write_left_out(run, ["host-b"])
    assert present(group) == ["a"]
    wait_for(lambda: group.growth(nodes[:1]) is not None or read_node_speeds(run))
    assert read_node_speeds(run) == {"host-b": (1.0,)}
    follower.leave()


@pytest.mark.chaos
def test_a_fork_of_the_fork_server_measures_the_devices(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", Recipe(), Plan())
    (run.path / "logs").mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    node = LocalNode(run, num_ranks=1, environment=environment, faults=FaultsSection())
    try:
        wait_for(lambda: node.warm)
        assert node.take_speed() is None
        node.begin_speed("cpu", seconds=0.1)
        began = time.monotonic()
        assert wait_for(node.take_speed) > 0
        assert time.monotonic() - began > 0.1
        assert node.take_speed() is None, "it is taken once"
    finally:
        node.close()

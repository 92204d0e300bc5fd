"""The links between nodes are measured before the first start, and the ranks are numbered by them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.fault.harness import lines, wait_for
from tests.fault.test_network import FakeNode, FollowerThread, node_group, present
from trimaran.core import Recipe
from trimaran.launch import Channel, RemoteNodeGroup, measure_link
from trimaran.launch.supervise.measure_links import MEASURE_LINK, serve_link
from trimaran.runs import RunDirectory, read_measured_links, run_token, take_lease

MEASURED = Recipe.model_validate({"nodes": {"order": "measured"}})
HEADS = "model.shape={layers: 2, hidden: 32, heads: 4, kv_heads: 4, ffn: 64}"


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    run = RunDirectory(tmp_path)
    made = Channel("127.0.0.1", run_token(run), own_node="a")
    made.streams[MEASURE_LINK] = serve_link
    with take_lease(run, address=made.address):
        yield made
    made.close()


def follower(run: RunDirectory, name: str) -> FollowerThread:
    made = FollowerThread(run, FakeNode(name, 1))
    made.channel.streams[MEASURE_LINK] = serve_link
    return made


def group_of(run: RunDirectory, channel: Channel, recipe: Recipe = MEASURED) -> RemoteNodeGroup:
    return node_group(run, channel, nodes=3, min_nodes=1, recipe=recipe)


def leave(*followers: FollowerThread) -> None:
    for each in followers:
        each.leave()


def names(group: RemoteNodeGroup) -> list[str]:
    return [node.name for node in group.wait_for_nodes() or []]


def test_a_link_is_measured_over_the_channel_and_strangers_cannot(tmp_path: Path, channel: Channel) -> None:
    token = run_token(RunDirectory(tmp_path))
    link = measure_link(channel.address, token, seconds=0.1)
    assert link.round_trip > 0
    assert link.bytes_per_second > 0
    with pytest.raises(OSError, match="does not know this token"):
        measure_link(channel.address, "another token", seconds=0.1)
    again = measure_link(channel.address, token, seconds=0.1)  # the channel still serves others
    assert again.bytes_per_second > 0


def test_all_pairs_are_measured_once_and_a_node_that_joins_adds_its_own(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group, others = group_of(run, channel), [follower(run, "b"), follower(run, "c")]
    order = names(group)
    assert sorted(order) == ["a", "b", "c"]
    first = read_measured_links(run)
    assert first.links.keys() == {frozenset("ab"), frozenset("ac"), frozenset("bc")}
    assert [*first.order] == order
    assert names(group) == order
    assert read_measured_links(run) == first, "it is not measured again"
    leave(others[1])
    wait_for(lambda: len(present(group)) == 2)
    joined = follower(run, "d")
    wait_for(lambda: len(present(group)) == 3)
    assert sorted(names(group)) == ["a", "b", "d"]
    second = read_measured_links(run)
    assert second.links.keys() - first.links.keys() == {frozenset("ad"), frozenset("bd")}
    assert all(second.links[pair] == link for pair, link in first.links.items())
    leave(others[0], joined)


def test_links_are_not_measured_if_nobody_asks(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = group_of(run, channel, Recipe())
    others = [follower(run, "b"), follower(run, "c")]
    assert names(group) == ["a", "b", "c"]
    assert not run.measured_links.exists()
    leave(*others)


def test_links_are_not_measured_if_switches_are_known(
    tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    monkeypatch.setenv("TRIMARAN_TOPOLOGY", "leaf2")
    group = group_of(run, channel)
    monkeypatch.setenv("TRIMARAN_TOPOLOGY", "leaf1")
    others = [follower(run, "b"), follower(run, "c")]
    wait_for(lambda: len(present(group)) == 3)
    assert names(group) == ["b", "c", "a"]
    assert not run.measured_links.exists()
    leave(*others)


def test_a_node_that_cannot_be_measured_does_not_stop_the_start(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group, others = group_of(run, channel), [follower(run, "b"), follower(run, "c")]
    del others[1].channel.streams[MEASURE_LINK]  # an older version
    assert names(group) == ["a", "b", "c"]
    assert read_measured_links(run).links.keys() == {frozenset("ab")}
    leave(*others)


def step_seconds(run: RunDirectory) -> float:
    return median(each["step_seconds"] for each in lines(run.metrics)[2:])


@pytest.mark.chaos
@ROOT_NEEDED
def test_four_nodes_at_two_sites_are_ordered_by_site_and_train_faster(tmp_path: Path) -> None:
    """The order of names puts each tensor-parallel pair across the slow link; the measured order does not."""
    wire = ("--sites", "0,1,0,1", "--between-delay", "0.02", "--between-rate", "50")
    settings = ("train.steps=8", "plan.mesh.dp_replicate=2", "plan.mesh.tp=2", HEADS, "faults.hang_seconds=60")
    environments = ({"TRIMARAN_TEST_PAUSE": "0"},) * 4
    took = {}
    for order in ("switches", "measured"):
        run = make_run(tmp_path / order, *settings, f"nodes.order={order}", nodes=4)
        with TwoMachines(run, "--no-check", wire=wire, environments=environments) as machines:
            began = time.monotonic()
            codes = [machine.wait(max(1.0, began + 240 - time.monotonic())) for machine in machines.all]
            assert codes == [0] * 4, "\n".join(each.log.read_text()[-3000:] for each in machines.all)
        took[order] = step_seconds(run)
    hosts = [lines(run.events(rank))[0]["data"]["host"][-1] for rank in range(4)]
    assert hosts in (["a", "c", "b", "d"], ["b", "d", "a", "c"])
    tree = json.loads(run.measured_links.read_text())
    assert [[name.partition("-")[0][-1] for name in group] for group in tree["groups"]] == [["a", "c"], ["b", "d"]]
    assert tree["seconds"] < 30
    assert took["measured"] < 0.75 * took["switches"], took

"""A machine that fails its preflight check keeps the run from starting on all nodes, which all get the reason."""

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.nodes import Machine, make_run
from tests.fault.harness import SECONDS, lines, start_module, wait_for
from tests.fault.test_network import WAIT_SECONDS, FakeNode, FollowerThread, node_group, present
from trimaran.core import UserError
from trimaran.launch import Channel, PreflightProcess, RemoteNodeGroup
from trimaran.runs import RunDirectory, run_token, take_lease, write_left_out

BAD_INTERFACE = {"GLOO_SOCKET_IFNAME": "nosuch0"}
ADDRESSES = ("127.0.0.1", "127.0.0.2")
UNFIT = UserError(
    "H007", "GLOO_SOCKET_IFNAME is nosuch0", where="node b", fix="unset it; or skip this check with --no-check"
)


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    run = RunDirectory(tmp_path)
    made = Channel("127.0.0.1", run_token(run), own_node="a")
    with take_lease(run, address=made.address):
        yield made
    made.close()


def join(run: RunDirectory, name: str, unfit: UserError | None = None) -> FollowerThread:
    return FollowerThread(run, FakeNode(name, 1), unfit=unfit)


def refusal(follower: FollowerThread) -> UserError:
    """Return why the run cannot work on some node, as this one is told."""
    follower.thread.join(WAIT_SECONDS)
    assert follower.end is not None
    assert follower.end.code == 2
    assert follower.end.refusal is not None
    return follower.end.refusal


def refused(group: RemoteNodeGroup) -> UserError:
    with pytest.raises(UserError) as caught:
        group.wait_for_nodes()
    group.dismiss(2, caught.value)
    return caught.value


def test_one_unfit_node_keeps_all_from_starting(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, min_nodes=1)  # although one node alone would be enough
    follower = join(run, "b", UNFIT)
    error = refused(group)
    assert (error.code, error.where, error.fix) == ("H007", "node b", UNFIT.fix)
    assert str(refusal(follower)) == str(error)


def test_a_node_that_was_fixed_in_time_joins(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, nodes=3, min_nodes=1)
    first, other = join(run, "b", UNFIT), join(run, "c")
    wait_for(lambda: present(group) == ["a", "c"] and first.connected)
    first.leave()
    again = join(run, "b")
    wait_for(lambda: present(group) == ["a", "b", "c"])
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b", "c"]
    other.leave()
    again.leave()


def test_an_unfit_node_that_joins_later_is_turned_away_and_the_others_continue(
    tmp_path: Path, channel: Channel
) -> None:
    run = RunDirectory(tmp_path)
    group, well = node_group(run, channel, min_nodes=1), join(run, "b")
    nodes = group.wait_for_nodes()
    assert nodes is not None
    late = join(run, "c", UNFIT)
    wait_for(lambda: group.growth(nodes) is not None or late.end is not None)
    assert str(refusal(late)) == str(UNFIT)
    assert group.growth(nodes) is None
    assert present(group) == ["a", "b"]
    well.leave()


def test_the_preflight_check_of_a_node_is_the_doctors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    checks = [PreflightProcess(run, kind="cpu", nodes=2)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    checks.append(PreflightProcess(run, kind="cpu", nodes=2, where="node b"))
    checks.append(PreflightProcess(RunDirectory(tmp_path / "none"), kind="no such kind"))
    fit, unfit, broken = [check.wait_for_error() for check in checks]
    assert fit is None
    assert unfit is not None
    assert (unfit.code, unfit.where) == ("H007", "node b")
    assert "GLOO_SOCKET_IFNAME is nosuch0" in unfit.what
    assert broken is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


class TwoAgents:
    """Two agents on this machine with two addresses; the second starts once the first holds the lease."""

    def __init__(self, run: RunDirectory, environments: tuple[dict[str, str], dict[str, str]], *flags: str) -> None:
        self.run, self.machines = run, list[Machine]()
        for address, environment in zip(ADDRESSES, environments, strict=True):
            each = Machine(run, address, ["--nodes", "2", "--node-wait", "300", *flags], environment=environment)
            self.machines.append(each)
            wait_for(lambda: any(run.lease.glob("term-*.json")))

    def __enter__(self) -> "TwoAgents":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.machines:
            each.lose()

    def logs(self) -> list[str]:
        return [each.log.read_text() for each in self.machines]


@pytest.mark.chaos
@pytest.mark.parametrize("unfit", [(0,), (1,), (0, 1)], ids=["coordinator", "follower", "both"])
def test_agents_with_an_unfit_machine_among_them_start_no_rank(tmp_path: Path, unfit: tuple[int, ...]) -> None:
    run = make_run(tmp_path / "run", "train.steps=5")
    first, second = (dict(BAD_INTERFACE) if each in unfit else {} for each in range(2))
    with TwoAgents(run, (first, second)) as pair:
        assert [each.wait(SECONDS) for each in pair.machines] == [2, 2]
        for log in pair.logs():
            *_, code, where, fix = log.strip().splitlines()
            assert code.startswith("H007: GLOO_SOCKET_IFNAME is nosuch0"), log
            assert [f"-{ADDRESSES[each]}" in where for each in range(2)] == [each in unfit for each in range(2)], log
            assert fix.endswith("or skip this check with --no-check"), log
    assert not run.attempts.exists()
    assert not run.events(0).exists()


@pytest.mark.chaos
def test_agents_without_the_check_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=5")
    with TwoAgents(run, (dict(BAD_INTERFACE), {}), "--no-check"):
        wait_for(lambda: lines(run.attempts))


@pytest.mark.chaos
def test_a_supervisor_on_one_machine_checks_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=3", "cluster=2xcpu")
    with (tmp_path / "log").open("wb") as log:
        assert start_module("trimaran.launch", str(run.path), output=log, environment=BAD_INTERFACE).wait(SECONDS) == 2
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-3].startswith("H007: GLOO_SOCKET_IFNAME is nosuch0")
    assert "  where: this machine" in said
    assert not run.attempts.exists()


@pytest.mark.chaos
def test_any_agent_shows_the_ranks_of_its_own_node(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=100")
    with TwoAgents(run, ({}, {})) as pair:
        wait_for(lambda: [each["step"] for each in lines(run.metrics)][-1:] >= [3])
        other = pair.machines[1]
        own = rank_of(run, other)
        other.process.send_signal(signal.SIGUSR1)
        shown = wait_for(lambda: [*run.ranks_shown.parent.glob(f"ranks-*-{other.address}.txt")])
        heads = [line for line in shown[0].read_text().splitlines() if line.startswith("rank ")]
        assert [line.split()[1] for line in heads] == [str(own)]
        assert "MiB resident" in heads[0]
        assert heads[0] in other.log.read_text()
        assert not run.ranks_shown.exists()
        shown[0].unlink()
        for each in pair.machines:  # as a scheduler sends it to all processes of a job
            each.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: shown[0].exists() and run.ranks_shown.exists())
        assert shown[0].read_text().startswith(f"rank {own} on ")
        heads = [line for line in run.ranks_shown.read_text().splitlines() if line.startswith("rank ")]
        assert ["does not answer" in line for line in heads] == [False, False], heads
        assert [each.wait(SECONDS) for each in pair.machines] == [0, 0]
    assert [each["step"] for each in lines(run.metrics)] == [*range(1, 101)]


def rank_of(run: RunDirectory, machine: Machine) -> int:
    """Return the rank that the agent of a machine has started."""
    below = {each.pid for each in psutil.Process(machine.process.pid).children(recursive=True)}
    started = {rank: newest(run, rank)["pid"] for rank in range(2)}
    (found,) = [rank for rank, pid in started.items() if pid in below]
    return found


def newest(run: RunDirectory, rank: int) -> dict[str, Any]:
    return [json.loads(line) for line in run.events(rank).read_text().splitlines() if '"start"' in line][-1]["data"]


def test_a_node_that_is_left_out_stays_connected_and_returns_when_it_is_wanted_again(
    tmp_path: Path, channel: Channel
) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, min_nodes=1)
    other = join(run, "b")
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b"]
    write_left_out(run, ["somewhere-else"])
    assert group.leaving(nodes) == []
    nodes[1].host = "slow-host"  # type: ignore[attr-defined]
    write_left_out(run, ["slow-host"])
    assert group.leaving(nodes) == ["b"]
    assert [node.name for node in group.wait_for_nodes() or []] == ["a"]
    assert group.growth(nodes[:1]) is None
    write_left_out(run, [])
    assert group.growth(nodes[:1]) == sum(node.num_ranks for node in nodes)
    other.leave()

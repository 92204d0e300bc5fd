"""A machine that fails its preflight check keeps the run from starting on all nodes, which all get the reason."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.chaos.nodes import Machine, make_run
from tests.fault.harness import lines, wait_for
from tests.fault.test_network import FakeNode, node_group
from trimaran.core import UserError
from trimaran.launch.channel import Channel
from trimaran.launch.follower import Follower, FollowerEnd
from trimaran.launch.preflight_process import PreflightProcess
from trimaran.launch.remote_node_group import RemoteNodeGroup
from trimaran.launch.signals import Signals
from trimaran.run import RunDirectory
from trimaran.run.lease import LeaseWatch, read_holder, run_token, take_lease
from trimaran.run.left_out_nodes import write_left_out

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


class FollowerThread:
    """A follower in its own thread, as if on another machine."""

    def __init__(self, run: RunDirectory, name: str, unfit: UserError | None) -> None:
        holder = read_holder(run)
        assert holder is not None
        self.end: FollowerEnd | None = None
        self.signals = Signals()
        channel = Channel("127.0.0.1", run_token(run), own_node=name)
        agent: Any = SimpleNamespace(run=run, node=FakeNode(name, 1), token=run_token(run), channel=channel)
        follower = Follower(agent, holder, unfit=unfit)
        self._thread = threading.Thread(target=self._follow, args=(follower, LeaseWatch(run), channel), daemon=True)
        self._thread.start()

    def _follow(self, follower: Follower, watch: LeaseWatch, channel: Channel) -> None:
        self.end = follower.follow(watch, self.signals)
        channel.close()

    def refusal(self) -> UserError:
        self._thread.join(10.0)
        assert self.end is not None
        assert self.end.code == 2
        assert self.end.refusal is not None
        return self.end.refusal

    def leave(self) -> None:
        self.signals.stop_requested = True
        self._thread.join(10.0)


def refused(group: RemoteNodeGroup) -> UserError:
    with pytest.raises(UserError) as caught:
        group.wait_for_nodes()
    group.dismiss(2, caught.value)
    return caught.value


def test_one_unfit_node_keeps_all_from_starting(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, min_nodes=1)  # although one node alone would be enough
    follower = FollowerThread(run, "b", UNFIT)
    error = refused(group)
    assert (error.code, error.where, error.fix) == ("H007", "node b", UNFIT.fix)
    assert str(follower.refusal()) == str(error)


def test_a_node_that_was_fixed_in_time_joins(tmp_path: Path, channel: Channel) -> None:
    run = RunDirectory(tmp_path)
    group = node_group(run, channel, min_nodes=1)
    group._agent.node_options = replace(group._agent.node_options, nodes=3)
    first, other = FollowerThread(run, "b", UNFIT), FollowerThread(run, "c", None)
    wait_for(lambda: len(group._present()) == 2 and group._unfit)
    first.leave()
    again = FollowerThread(run, "b", None)
    wait_for(lambda: group._present() and not group._unfit)  # until then all three are connected, one of them unfit
    nodes = group.wait_for_nodes()
    assert nodes is not None
    assert [node.name for node in nodes] == ["a", "b", "c"]
    other.leave()
    again.leave()


def test_an_unfit_node_that_joins_later_is_turned_away_and_the_others_continue(
    tmp_path: Path, channel: Channel
) -> None:
    run = RunDirectory(tmp_path)
    group, well = node_group(run, channel, min_nodes=1), FollowerThread(run, "b", None)
    nodes = group.wait_for_nodes()
    assert nodes is not None
    late = FollowerThread(run, "c", UNFIT)
    wait_for(lambda: "c" in group._turned_away or group.growth(nodes))
    assert str(late.refusal()) == str(UNFIT)
    assert group.growth(nodes) is None
    assert [node.name for node in group._present()] == ["a", "b"]
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
            each = Machine(run, address, ["--nodes", "2", "--node-wait", "30", *flags], environment=environment)
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
        assert [each.wait(60) for each in pair.machines] == [2, 2]
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
    command = [sys.executable, "-m", "trimaran.launch", str(run.path)]
    result = subprocess.run(command, env=os.environ | BAD_INTERFACE, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-3].startswith("H007: GLOO_SOCKET_IFNAME is nosuch0")
    assert "  where: this machine" in result.stderr
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
        assert [each.wait(60) for each in pair.machines] == [0, 0]
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
    other = FollowerThread(run, "b", None)
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
    other.signals.stop_requested = other.signals.kill_requested = True

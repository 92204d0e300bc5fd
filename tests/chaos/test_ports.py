"""Strangers that flood the ports of the ranks."""

import resource
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import assert_as_undisturbed, remove_pause, start_run
from tests.fault.harness import Supervised, wait_for
from trimaran.core import EXIT_DONE

pytestmark = pytest.mark.chaos

RANKS = 4
DESCRIPTOR_LIMIT = 1024
CONNECTIONS_PER_RANK = 2000


def listening_ports(pid: int) -> list[int]:
    return [each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]


def open_connections(ports: list[int], count: int) -> list[socket.socket]:
    """Begin `count` connections to `ports`, in turn, and return them; none is waited for."""
    opened = []
    for number in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", ports[number % len(ports)]))
        opened.append(stranger)
        if number % 100 == 99:
            time.sleep(0.01)  # so that the listeners' queues do not overflow
    return opened


def flood(supervised: Supervised) -> list[socket.socket]:
    """Give the ranks few descriptors, as `ulimit -n` does, and open more connections than that to each of them."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    opened = []
    for rank in range(RANKS):
        pid = supervised.pid(rank)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTOR_LIMIT, DESCRIPTOR_LIMIT))
        opened += open_connections(listening_ports(pid), CONNECTIONS_PER_RANK)
    return opened


def test_strangers_on_the_ports_of_ranks_neither_stop_the_run_nor_go_unnoticed(tmp_path: Path) -> None:
    settings = ("train.steps=120", "plan.mesh.dp_replicate=2", "plan.mesh.tp=2")
    with start_run(tmp_path / "run", *settings, ranks=RANKS) as supervised:
        supervised.wait_for_step(5)
        opened = flood(supervised)
        wait_for(lambda: len(supervised.incidents) > 0, 30)
        before = supervised.step()
        supervised.wait_for_step(before + 20)
        used = [psutil.Process(supervised.pid(rank)).num_fds() for rank in range(RANKS)]
        for each in opened:
            each.close()
        remove_pause(supervised)
        assert supervised.process.wait(120) == EXIT_DONE
        (incident,) = supervised.incidents
    assert (incident.cause, incident.action) == ("network", "continued")
    assert "another program tries to connect" in incident.what
    assert sum(each["refused"] for each in incident.evidence["ranks"].values()) >= 1000
    assert max(used) < 300
    assert_as_undisturbed(supervised.run, tmp_path / "calm")

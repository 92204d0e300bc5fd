"""The ports of gloo are closed to strangers once the ranks of a group are connected."""

import os
import socket
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.runs import closed_listeners, count_refused_packets

CONNECT_SECONDS = 0.5  # a port on loopback takes a connection in well under a millisecond


def listening_ports() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}


def is_open(port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(CONNECT_SECONDS)
        return stranger.connect_ex(("127.0.0.1", port)) == 0


def total(group: Any) -> float:
    numbers = torch.ones(1)
    dist.all_reduce(numbers, group=group)
    return numbers.item()


def _meet_strangers() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    others = listening_ports()  # gloo's first one and, on rank 0, that of the store
    with closed_listeners():
        first, second = dist.new_group(), dist.new_group()
    closed = listening_ports() - others
    assert len(closed) == 2
    assert not any(is_open(port) for port in closed)
    refused = count_refused_packets()
    assert refused >= 2
    dist.barrier()  # the strangers of all ranks have come and gone
    assert [total(group) for group in (first, second, None)] == [3.0] * 3

    with socket.create_server(("127.0.0.1", 0)) as server, closed_listeners():
        later = dist.new_group()
        assert total(later) == 3.0
        assert is_open(server.getsockname()[1])
    assert sum(is_open(port) for port in listening_ports() - others - closed) == 0
    assert all(is_open(port) for port in others)
    assert [total(group) for group in (first, second, later, None)] == [3.0] * 4
    assert count_refused_packets() > refused
    dist.barrier()
    dist.destroy_process_group()


def test_strangers_are_refused_after_the_ranks_are_connected_and_groups_go_on() -> None:
    run_ranks(3, _meet_strangers)


def _keep_a_listener_of_others() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with closed_listeners():
        inside = socket.create_server(("127.0.0.1", 0))  # not polled with epoll, such as those of NCCL
    assert [is_open(each.getsockname()[1]) for each in (server, inside)] == [True, True]
    assert count_refused_packets() == 0


def test_ports_of_others_stay_open() -> None:
    run_ranks(1, _keep_a_listener_of_others)

"""The check of an allocation of 64 nodes: the real rendezvous with one process a node; only the links are simulated."""

import multiprocessing
import os
import socket
import time
from multiprocessing.queues import Queue
from typing import Any

import pytest

from trimaran.machine import PAIR_SECONDS, NodeRendezvous, first_round, second_round

NODES, BAD = 64, 13
LINK_SECONDS = 4.0  # a pair starts its ranks, meets, and all-reduces for 1 s


class SimulatedLinks(NodeRendezvous):
    """Takes as long for a pair as real links do; a pair with the bad node takes until it times out."""

    def _measure_pair(self, name: str, side: int, *, kind: str, devices: int) -> float | None:
        is_bad = str(BAD) in name.partition("/")[2].split("-")
        time.sleep(PAIR_SECONDS if is_bad else LINK_SECONDS)
        return None if is_bad else 0.001


def check_node(address: str, node: int, answers: "Queue[Any]") -> None:
    began = time.monotonic()
    met = SimulatedLinks(address, NODES, node, seconds=60.0)
    first, second = (
        {(int(a), int(b)): took for pair, took in found.items() for a, _, b in [pair.partition("-")]}
        for found in _rounds(met)
    )
    others = met.gather([{"node": node}])
    if node == 0:
        answers.put((time.monotonic() - began, first, second, len(met.skews), len(others)))
        answers.close()
        answers.join_thread()
    os._exit(0)


def _rounds(met: NodeRendezvous) -> list[dict[str, float | None]]:
    first = met.measure(first_round(NODES), kind="cpu", devices=1)
    seen = {(int(a), int(b)): took for pair, took in first.items() for a, _, b in [pair.partition("-")]}
    return [first, met.measure(second_round(NODES, seen), kind="cpu", devices=1)]


@pytest.mark.slow
def test_64_nodes_with_a_bad_one_are_checked_within_a_minute() -> None:
    assert PAIR_SECONDS <= 20.0
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("fork")
    answers: Queue[Any] = context.Queue()
    nodes = [context.Process(target=check_node, args=(address, node, answers)) for node in range(NODES)]
    for each in nodes:
        each.start()
    seconds, first, second, num_skews, num_others = answers.get(timeout=200.0)
    for each in nodes:
        each.join()
    print(f"{NODES} nodes: {seconds:.1f} s")
    assert (num_skews, num_others) == (NODES - 1, NODES - 1)
    assert [pair for pair, took in first.items() if took is None] == [(BAD - 1, BAD)]
    assert {BAD} == set.intersection(
        *(set(pair) for found in (first, second) for pair, took in found.items() if not took)
    )
    assert seconds < 60.0

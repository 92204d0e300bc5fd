"""Nodes meet at an address, compare their clocks, and measure the links between them pair by pair."""

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.probe.probe_ranks import all_reduce_with, merge_answers, run_forked

PAIR_SECONDS = 20.0  # for a pair to meet and to all-reduce
ALL_REDUCE_SECONDS = 1.0  # of all-reduces; the fastest counts, which no other process interrupted
Pair = tuple[int, int]


class NodeRendezvous:
    """One node's side of the rendezvous. Node 0 hosts the store, lists the nodes and decides for all.

    All values in the store are JSON, so reading them is safe.
    """

    def __init__(self, address: str, nodes: int, node: int, *, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._nodes, self._node = host.strip("[]"), int(port), nodes, node
        self._seconds, self._round = seconds, 0
        self._store = dist.TCPStore(
            self._host, self._port, is_master=node == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.names = self._exchange_names()
        self.skews = self._compare_clocks()

    def _exchange_names(self) -> list[str]:
        """Return the host names of all nodes; raise when some did not join in time."""
        self._put(f"name/{self._node}", socket.gethostname())
        if self._node == 0:
            end = time.monotonic() + self._seconds
            names = [self._get_until(f"name/{node}", end) for node in range(self._nodes)]
            self._put("names", names)
        names = self._get("names", 2 * self._seconds)
        absent = [str(node) for node, name in enumerate(names) if name is None]
        if absent:
            raise TimeoutError(f"node {', '.join(absent)} of {self._nodes} did not join within {self._seconds:g} s")
        return [f"{name} (node {node})" for node, name in enumerate(names)]

    def _compare_clocks(self) -> dict[int, float]:
        """Return by how many seconds each node's clock is ahead of node 0's; empty on other nodes.

        Request and answer are taken to travel equally long, so the error is up to half the round trip.
        """
        if self._node:
            self._get(f"turn/{self._node}", self._seconds * self._nodes)
            sent = time.time()
            self._put(f"request/{self._node}", sent)
            clock = self._get(f"clock/{self._node}", self._seconds)
            self._put(f"skew/{self._node}", (sent + time.time()) / 2 - clock)
            return {}
        skews: dict[int, float] = {}
        for node in range(1, self._nodes):
            self._put(f"turn/{node}", True)
            self._get(f"request/{node}", self._seconds)
            self._put(f"clock/{node}", time.time())
            skews[node] = float(self._get(f"skew/{node}", self._seconds))
        return skews

    def measure(self, pairs: Sequence[Pair], *, kind: str, devices: int) -> dict[str, float | None]:
        """Return the seconds of a large all-reduce by pair (`0-1`), the same on all nodes; None where it failed."""
        self._round += 1
        for left, right in pairs:
            if self._node in (left, right):
                name = f"{self._round}/{left}-{right}"
                took = self._measure_pair(name, 0 if self._node == left else 1, kind=kind, devices=devices)
                self._put(f"took/{name}/{self._node}", took)
        if self._node == 0:
            # At worst all pairs time out one after another, as a node measures its pairs in turn.
            end = time.monotonic() + PAIR_SECONDS * (1 + len(pairs))
            keys = {f"{a}-{b}": [f"took/{self._round}/{a}-{b}/{each}" for each in (a, b)] for a, b in pairs}
            took_by_pair = {name: [self._get_until(key, end) for key in both] for name, both in keys.items()}
            seconds = {name: None if None in both else max(map(float, both)) for name, both in took_by_pair.items()}
            self._put(f"result/{self._round}", seconds)
        return self._get(f"result/{self._round}", PAIR_SECONDS * (2 + len(pairs)))

    def gather(self, value: Any) -> dict[str, Any]:
        """Send a value to node 0; return there those of the others, without nodes that sent none in time."""
        self._put(f"value/{self._node}", value)
        if self._node:
            self._get("read", self._seconds * self._nodes)  # node 0 hosts the store and must have read the value
            return {}
        end = time.monotonic() + self._seconds
        values = {str(node): self._get_until(f"value/{node}", end) for node in range(1, self._nodes)}
        self._put("read", True)
        time.sleep(0.2)  # so that the others can read it before the store ends
        return {node: value for node, value in values.items() if value is not None}

    def _measure_pair(self, name: str, side: int, *, kind: str, devices: int) -> float | None:
        local = 1 if DEVICE_TRAITS[kind].shares_cores else devices
        arguments = [(self._host, self._port, name, kind, side * local + each, 2 * local) for each in range(local)]
        answer = merge_answers(run_forked(_run_pair_rank, arguments, seconds=PAIR_SECONDS), kind)
        return None if "error" in answer or answer["wrong"] else float(answer["seconds"])

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str, seconds: float) -> Any:
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))

    def _get_until(self, key: str, end: float) -> Any:
        """Return the value, waiting until `end` at most; None without one."""
        try:
            return self._get(key, max(0.05, end - time.monotonic()))
        except dist.DistStoreError:
            return None


def _run_pair_rank(host: str, port: int, name: str, kind: str, rank: int, ranks: int) -> dict[str, Any]:
    limit = PAIR_SECONDS - 2.0
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    prefixed = dist.PrefixStore(f"pair/{name}", store)
    return all_reduce_with(prefixed, kind, rank, ranks, seconds=ALL_REDUCE_SECONDS, limit=limit)

"""Nodes that meet at an address, compare their clocks and measure the ways between them, a pair at a time."""

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trimaran.probe.probe_ranks import run_forked, sum_with, verdict

PAIR_SECONDS = 20.0  # that a pair has to find each other and to sum
SUM_SECONDS = 1.0  # of sums, of which the best counts: the one that nobody interrupted
Pair = tuple[int, int]


class NodeRendezvous:
    """One node's part of the meeting. Node 0 keeps the store and the roster; what it says goes for all.

    What comes through the store is text that is read as JSON, whoever wrote it.
    """

    def __init__(self, address: str, nodes: int, node: int, *, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._nodes, self._node = host.strip("[]"), int(port), nodes, node
        self._seconds, self._round = seconds, 0
        self._store = dist.TCPStore(
            self._host, self._port, is_master=node == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.names = self._call_roll()
        self.skews = self._compare_clocks()

    def _call_roll(self) -> list[str]:
        """Return the host names of all nodes; raise when some did not come in time."""
        self._put(f"here/{self._node}", socket.gethostname())
        if self._node == 0:
            end = time.monotonic() + self._seconds
            names = [self._get_until(f"here/{node}", end) for node in range(self._nodes)]
            self._put("roster", names)
        names = self._get("roster", 2 * self._seconds)
        absent = [str(node) for node, name in enumerate(names) if name is None]
        if absent:
            raise TimeoutError(f"node {', '.join(absent)} of {self._nodes} did not come within {self._seconds:g} s")
        return [f"{name} (node {node})" for node, name in enumerate(names)]

    def _compare_clocks(self) -> dict[int, float]:
        """Return how many seconds each node's clock is ahead of node 0's; on node 0 only. Half a message's way is its
        error: the question and the answer are taken to travel equally long."""
        if self._node:
            self._get(f"turn/{self._node}", self._seconds * self._nodes)
            asked = time.time()
            self._put(f"ask/{self._node}", asked)
            told = self._get(f"told/{self._node}", self._seconds)
            self._put(f"skew/{self._node}", (asked + time.time()) / 2 - told)
            return {}
        skews: dict[int, float] = {}
        for node in range(1, self._nodes):
            self._put(f"turn/{node}", True)
            self._get(f"ask/{node}", self._seconds)
            self._put(f"told/{node}", time.time())
            skews[node] = float(self._get(f"skew/{node}", self._seconds))
        return skews

    def measure(self, pairs: Sequence[Pair], *, kind: str, devices: int) -> dict[str, float | None]:
        """Return the seconds of a large sum by pair (`0-1`), the same on all nodes; None where it did not end."""
        self._round += 1
        for left, right in pairs:
            if self._node in (left, right):
                name = f"{self._round}/{left}-{right}"
                took = self._exchange(name, 0 if self._node == left else 1, kind=kind, devices=devices)
                self._put(f"took/{name}/{self._node}", took)
        if self._node == 0:
            # One after the other at worst: where few are well, a node waits for its pairs in turn.
            end = time.monotonic() + PAIR_SECONDS * (1 + len(pairs))
            keys = {f"{a}-{b}": [f"took/{self._round}/{a}-{b}/{each}" for each in (a, b)] for a, b in pairs}
            found = {name: [self._get_until(key, end) for key in both] for name, both in keys.items()}
            seconds = {name: None if None in both else max(map(float, both)) for name, both in found.items()}
            self._put(f"result/{self._round}", seconds)
        return self._get(f"result/{self._round}", PAIR_SECONDS * (2 + len(pairs)))

    def share(self, value: Any) -> dict[str, Any]:
        """Tell node 0 something, and return on node 0 what the others told; those that say nothing are left out."""
        self._put(f"note/{self._node}", value)
        if self._node:
            self._get("read", self._seconds * self._nodes)  # node 0 keeps the store: it must not go before us
            return {}
        end = time.monotonic() + self._seconds
        told = {str(node): self._get_until(f"note/{node}", end) for node in range(1, self._nodes)}
        self._put("read", True)
        time.sleep(0.2)
        return {node: value for node, value in told.items() if value is not None}

    def _exchange(self, name: str, side: int, *, kind: str, devices: int) -> float | None:
        local = devices if kind == "cuda" else 1
        places = [(self._host, self._port, name, kind, side * local + each, 2 * local) for each in range(local)]
        answer = verdict(run_forked(_rank_of_pair, places, seconds=PAIR_SECONDS), kind)
        return None if "error" in answer or answer["wrong"] else float(answer["seconds"])

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str, seconds: float) -> Any:
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))

    def _get_until(self, key: str, end: float) -> Any:
        """Return what is there at `end` at the latest, else None."""
        try:
            return self._get(key, max(0.05, end - time.monotonic()))
        except dist.DistStoreError:
            return None


def _rank_of_pair(host: str, port: int, name: str, kind: str, rank: int, ranks: int) -> dict[str, Any]:
    limit = PAIR_SECONDS - 2.0
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    return sum_with(dist.PrefixStore(f"pair/{name}", store), kind, rank, ranks, seconds=SUM_SECONDS, limit=limit)

"""Matmuls and all-reduces on forked ranks: whether the results are right, and how long they take.

Nodes meet at an address, compare their clocks, and measure the links between them pair by pair.
"""

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS
from trimaran.machine.probe.calibrate import matmul_flops
from trimaran.machine.probe.collective_calls import START_SECONDS, open_store, run_forked, synchronize, take_device

MATMUL_SHAPE = {"cuda": (8192, 8192, 8192), "cpu": (768, 768, 768)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Message lengths whose sums are checked: odd ones, which do not split into equal chunks, and a large one.
CHECKED_LENGTHS = {"cpu": (1, 17, 4099, 1 << 20), "cuda": (1, 17, 4099, (1 << 20) + 3, 1 << 25)}
TIMED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
MODULUS = 1021  # below 1024, so that sums over 16,384 ranks are exact in float32


def measure_matmuls(kind: str, *, devices: int, cores: int, seconds: float) -> dict[str, Any]:
    """Return the matmul flops per second of each device; all cores of a CPU are one device."""
    traits = DEVICE_TRAITS[kind]
    precision = "bf16" if traits.prefers_16_bits else "fp32"
    num_devices, threads = (1, cores) if traits.shares_cores else (devices, 1)
    arguments = [(kind, index, threads, precision, seconds) for index in range(num_devices)]
    answers = run_forked(_matmul, arguments, seconds=START_SECONDS + seconds)
    names = ["the CPU"] if traits.shares_cores else [f"GPU {index}" for index in range(devices)]
    by_name = {
        name: answer or {"error": "it did not finish a matmul"} for name, answer in zip(names, answers, strict=True)
    }
    return {
        "rates": {name: answer["flops"] for name, answer in by_name.items() if "flops" in answer},
        "failures": {name: answer["error"] for name, answer in by_name.items() if "error" in answer},
        "precision": precision,
        "capabilities": [answer["capability"] for answer in by_name.values() if "capability" in answer],
    }


def cuda_versions() -> dict[str, Any]:
    """Return CUDA's architectures and the NCCL version; raises where CUDA cannot be used."""
    torch.cuda.init()
    return {"archs": torch.cuda.get_arch_list(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _matmul(kind: str, index: int, cores: int, precision: str, seconds: float) -> dict[str, Any]:
    device = take_device(kind, index)
    if DEVICE_TRAITS[kind].shares_cores:
        torch.set_num_threads(cores)
        return {"flops": matmul_flops(DTYPES[precision], MATMUL_SHAPE[kind], device, seconds=seconds)}
    major, minor = torch.cuda.get_device_capability(device)
    capability = {"capability": f"sm_{major}{minor}"}
    dtype = DTYPES[precision] if (major, minor) >= (8, 0) else torch.float16
    flops = matmul_flops(dtype, MATMUL_SHAPE[kind], device, seconds=seconds)
    return capability | ({"flops": flops} if flops else {"error": f"no kernel for {precision} on GPU {index}"})


def measure_all_reduce(kind: str, ranks: int, *, seconds: float) -> dict[str, Any]:
    """Return whether all-reduces over `ranks` were right, and how long a large one takes."""
    with TemporaryDirectory() as folder:
        arguments = [(kind, rank, ranks, f"{folder}/store", seconds) for rank in range(ranks)]
        answers = run_forked(_all_reduce_here, arguments, seconds=START_SECONDS + 4 * seconds)
    return merge_answers(answers, DEVICE_TRAITS[kind].backend)


def merge_answers(answers: list[Any], backend: str) -> dict[str, Any]:
    """Return one answer from those of all ranks; an error if any rank failed or did not finish."""
    errors = {rank: answer["error"] for rank, answer in enumerate(answers) if answer and "error" in answer}
    unfinished = [rank for rank, answer in enumerate(answers) if answer is None]
    common = {"ranks": len(answers), "backend": backend}
    if errors or unfinished:
        first = next(iter(errors), None)
        error = f"rank {first}: {errors[first]}" if first is not None else f"rank {unfinished[0]} did not finish"
        return common | {"error": error}
    wrong = {rank: answer["wrong"] for rank, answer in enumerate(answers) if answer["wrong"]}
    return common | {
        "checked": answers[0]["checked"],
        "wrong": wrong,
        "bytes": answers[0]["bytes"],
        "seconds": max(answer["seconds"] for answer in answers),
    }


def _all_reduce_here(kind: str, rank: int, ranks: int, store_path: str, seconds: float) -> dict[str, Any]:
    return all_reduce_with(dist.FileStore(store_path, ranks), kind, rank, ranks, seconds=seconds, limit=START_SECONDS)


def all_reduce_with(
    store: dist.Store, kind: str, rank: int, ranks: int, *, seconds: float, limit: float
) -> dict[str, Any]:  # fmt: skip
    """Join a group of `ranks` in `store`; return how many sums were wrong here, and the time of a large all-reduce."""
    torch.set_num_threads(1)
    device = take_device(kind, rank)
    dist.init_process_group(
        DEVICE_TRAITS[kind].backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit)
    )
    wrong, checked = count_wrong_values(rank, ranks, CHECKED_LENGTHS[kind], device), sum(CHECKED_LENGTHS[kind])
    # The fastest of several large all-reduces. All ranks stop after the same one.
    message = torch.zeros(TIMED_BYTES[kind] // 4, device=device)
    dist.all_reduce(message)  # the first one opens connections
    best, spent = float("inf"), 0.0
    while spent < seconds:
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(message)
        synchronize(device)
        took = time.perf_counter() - start
        slowest = torch.tensor([took], device=device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        best, spent = min(best, took), spent + float(slowest.item())
    return {"wrong": wrong, "checked": checked, "bytes": TIMED_BYTES[kind], "seconds": best}


def pattern(rank: int, length: int, device: torch.device) -> torch.Tensor:
    """Return integers that depend on rank and position, so that a lost, doubled or shifted chunk changes the sum."""
    position = torch.arange(length, device=device, dtype=torch.int64)
    return ((position * 31 + rank * 17 + 1) % MODULUS).to(torch.float32)


def count_wrong_values(rank: int, ranks: int, lengths: tuple[int, ...], device: torch.device) -> int:
    """Return how many values of the all-reduced messages are not exactly right."""
    wrong = 0
    for length in lengths:
        message = pattern(rank, length, device)
        dist.all_reduce(message)
        expected = torch.zeros_like(message)
        for other in range(ranks):
            expected += pattern(other, length, device)
        wrong += int((message != expected).sum().item())
    return wrong


PAIR_SECONDS = 20.0  # for a pair to meet and to all-reduce
ALL_REDUCE_SECONDS = 1.0  # of all-reduces; the fastest counts, which no other process interrupted
Pair = tuple[int, int]


class NodeRendezvous:
    """One node's side of the rendezvous. Node 0 hosts the store, lists the nodes and decides for all.

    All values in the store are JSON, so reading them is safe.
    """

    def __init__(self, address: str, nodes: int, node: int, *, seconds: float) -> None:
        self._address, self._nodes, self._node = address, nodes, node
        self._seconds, self._round = seconds, 0
        self._store = open_store(address, seconds, is_master=node == 0)
        self._put(f"name/{self._node}", socket.gethostname())
        if self._node == 0:
            end = time.monotonic() + self._seconds
            names = [self._get_until(f"name/{node}", end) for node in range(self._nodes)]
            self._put("names", names)
        names = self._get("names", 2 * self._seconds)
        absent = [str(node) for node, name in enumerate(names) if name is None]
        if absent:
            raise TimeoutError(f"node {', '.join(absent)} of {self._nodes} did not join within {self._seconds:g} s")
        self.names = [f"{name} (node {node})" for node, name in enumerate(names)]
        self.skews = self._compare_clocks()

    def _compare_clocks(self) -> dict[int, float]:
        """Return how far each node's clock is ahead of node 0's, within half a round trip; empty on other nodes."""
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
        arguments = [(self._address, name, kind, side * local + each, 2 * local) for each in range(local)]
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


def _run_pair_rank(address: str, name: str, kind: str, rank: int, ranks: int) -> dict[str, Any]:
    limit = PAIR_SECONDS - 2.0
    store = dist.PrefixStore(f"pair/{name}", open_store(address, limit))
    return all_reduce_with(store, kind, rank, ranks, seconds=ALL_REDUCE_SECONDS, limit=limit)

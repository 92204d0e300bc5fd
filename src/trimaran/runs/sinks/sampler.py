"""Samples a node: its host, its GPUs and its ranks."""

import contextlib
import logging
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trimaran.machine import GpuSampler, total_and_used_bytes
from trimaran.runs.heartbeat import HeartbeatBoard
from trimaran.runs.line_files import LineWriter
from trimaran.runs.run_directory import RunDirectory

log = logging.getLogger(__name__)


RDMA = Path("/sys/class/infiniband")
RDMA_COUNTER_BYTES = 4  # InfiniBand counts data in units of four bytes
RANK_PROCESS_NAME = re.compile(r"trimaran-(\d+)")  # loader processes inherit it
UNAVAILABLE = (psutil.Error, OSError, ValueError, AttributeError)  # a missing process, counter or folder


@dataclass(slots=True)
class CounterRates:
    """Turns growing counters into rates per second since the previous call."""

    _before: dict[Any, float] = field(default_factory=dict)
    _at: float = 0.0

    def of(self, counters: dict[Any, float], now: float) -> dict[Any, float]:
        """Return the rates of the counters that the previous call had; a counter that was reset has no rate."""
        before, seconds = self._before, now - self._at
        self._before, self._at = counters, now
        if seconds <= 0:
            return {}
        increases = {name: value - before[name] for name, value in counters.items() if name in before}
        return {name: increase / seconds for name, increase in increases.items() if increase >= 0}


class HostSampler:
    """Samples this node. `disk` is a folder on the disk to sample; ranks are descendants of `supervisor`."""

    def __init__(self, disk: Path, *, supervisor: int) -> None:
        self._disk, self._supervisor = disk, supervisor
        self._cores, self._name = psutil.cpu_count() or 1, platform.node()
        self._rates, self._rank_rates = CounterRates(), CounterRates()
        self.sample()  # the first rates are since now

    def sample(self) -> dict[str, Any]:
        """Return a sample; values that the kernel does not report are left out."""
        found: dict[str, Any] = {"host": self._name, "cores": self._cores}
        counters: dict[str, float] = {}
        with contextlib.suppress(*UNAVAILABLE):
            found["load"] = round(psutil.getloadavg()[0], 2)
        with contextlib.suppress(*UNAVAILABLE):  # of the node, or of the container if its limit is lower
            total, used = total_and_used_bytes()
            found |= {"ram": total, "ram_used": used, "swap_used": psutil.swap_memory().used}
        with contextlib.suppress(*UNAVAILABLE):
            found["disk_free"] = shutil.disk_usage(self._disk).free
        with contextlib.suppress(*UNAVAILABLE):
            times = psutil.cpu_times()  # user time includes guest time
            counters["busy"] = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        with contextlib.suppress(*UNAVAILABLE):
            if disk := psutil.disk_io_counters():
                counters |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
        with contextlib.suppress(*UNAVAILABLE):  # of the whole machine (`/proc/vmstat`)
            swap = psutil.swap_memory()
            counters |= {"swap_read": swap.sin, "swap_written": swap.sout}
        with contextlib.suppress(*UNAVAILABLE):  # of all interfaces but loopback; RDMA traffic is not in these counters
            cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
            counters["net_received"] = sum(card.bytes_recv for card in cards)
            counters["net_sent"] = sum(card.bytes_sent for card in cards)
        with contextlib.suppress(*UNAVAILABLE):
            for name, file in (("rdma_received", "port_rcv_data"), ("rdma_sent", "port_xmit_data")):
                ports = [int(path.read_text(encoding="ascii")) for path in RDMA.glob(f"*/ports/*/counters/{file}")]
                if ports:
                    counters[name] = RDMA_COUNTER_BYTES * sum(ports)
        rates = self._rates.of(counters, time.monotonic())
        if "busy" in rates:
            found["cpu"] = round(min(1.0, rates.pop("busy") / self._cores), 4)
        return found | {name: round(rate) for name, rate in rates.items()} | {"ranks": self._ranks()}

    def _ranks(self) -> dict[str, dict[str, Any]]:
        """Return what each rank on this node uses; processes that end meanwhile are left out."""
        found: dict[str, dict[str, Any]] = {}
        counters: dict[tuple[str, str, int], float] = {}
        loaders: dict[str, int] = {}
        with contextlib.suppress(*UNAVAILABLE):
            for rank, what, process in _rank_processes(self._supervisor):
                with contextlib.suppress(*UNAVAILABLE), process.oneshot():
                    times = process.cpu_times()
                    counters[rank, what, process.pid] = times.user + times.system
                    memory = process.memory_info()
                    private = memory.rss - getattr(memory, "shared", 0)  # without mapped files and shared memory
                    if what == "cpu":
                        found[rank] = {"ram": memory.rss, "private": private, "threads": process.num_threads()}
                    else:
                        loaders[rank] = loaders.get(rank, 0) + private
        for rank, private in loaders.items():
            if rank in found:
                found[rank]["loader_private"] = private
        for (rank, what, _), cores in self._rank_rates.of(counters, time.monotonic()).items():
            if rank in found:
                found[rank][what] = round(found[rank].get(what, 0.0) + cores, 3)
        return found


def _rank_processes(supervisor: int) -> list[tuple[str, str, psutil.Process]]:
    """Return (rank, key, process) of the supervisor's ranks (`cpu`) and their child processes (`loader_cpu`)."""
    found: list[tuple[str, str, psutil.Process]] = []
    rank_of: dict[int, str] = {}
    # Parents come before their children. A child of a rank's process is one of its loaders.
    for process in psutil.Process(supervisor).children(recursive=True):
        if process.pid == os.getpid():
            continue  # under torchrun a rank starts this sidecar, which is no loader
        with contextlib.suppress(*UNAVAILABLE):
            parent, match = process.ppid(), RANK_PROCESS_NAME.fullmatch(process.name())
            if parent in rank_of:
                rank_of[process.pid] = rank_of[parent]
                found.append((rank_of[parent], "loader_cpu", process))
            elif match:
                rank_of[process.pid] = match[1]
                found.append((match[1], "cpu", process))
    return found


FIRST_SAMPLE_SECONDS = 1.0  # after the start, so that short runs have a sample too
MIN_LAST_SAMPLE_SECONDS = 0.2  # between the last periodic sample and the one at the end


class Sampler:
    """Writes samples of node `node`. `supervisor` started its ranks, whose heartbeats are on `board`."""

    def __init__(
        self,
        run: RunDirectory,
        node: int,
        *,
        supervisor: int,
        visible: str | None,
        board: HeartbeatBoard | None = None,
        writer: LineWriter | None = None,
    ) -> None:
        self.node, self._board = node, board
        self._host, self._gpus = HostSampler(run.path, supervisor=supervisor), GpuSampler(visible)
        self._writer = writer or LineWriter(run.samples(node))  # keeps samples in memory while the disk is full
        self._warned = False
        self._last = time.monotonic()

    def take(self) -> dict[str, Any]:
        """Write a sample and return it."""
        self._last = time.monotonic()
        host = self._host.sample()
        if self._board is not None:
            add_heartbeats(host["ranks"], self._board)
        line = {"time": round(time.time(), 3), "node": self.node, **host, "gpus": self._gpus.sample()}
        try:
            self._writer.write(line)
        except OSError as error:  # such as a missing permission
            if not self._warned:
                log.warning("samples are lost: %s", error)
            self._warned = True
        return line

    def take_last(self) -> dict[str, Any] | None:
        """Write a sample at the end of the run, unless one was just written."""
        return self.take() if time.monotonic() - self._last > MIN_LAST_SAMPLE_SECONDS else None

    def close(self) -> None:
        self._gpus.close()
        self._writer.close()


def add_heartbeats(ranks: dict[str, dict[str, Any]], board: HeartbeatBoard) -> None:
    """Add to each rank what it does, its step, and the seconds since its last progress and its last heartbeat."""
    now, first = time.monotonic(), board.first_rank
    for rank, found in ranks.items():
        if 0 <= (row := int(rank) - first) < board.num_ranks:
            beat = board.read(row)
            found |= {"section": beat.section, "step": beat.step, "progress_seconds": round(now - beat.entered, 2),
                      "heartbeat_seconds": round(now - beat.alive, 2)}  # fmt: skip

"""How this machine and the ranks on it are doing, from what the kernel counts."""

import contextlib
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

RDMA = Path("/sys/class/infiniband")
RDMA_WORD = 4  # bytes: InfiniBand counts its data in words of four
# Where the kernel says how much memory a container may have, and how much of it is used: of cgroups v2, and of v1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
RANK = re.compile(r"trimaran-(\d+)")  # what a rank's process calls itself; its loaders keep the name
GONE = (psutil.Error, OSError, ValueError, AttributeError)  # a process, a counter or a folder that is not there


@dataclass(slots=True)
class CounterRates:
    """Turns counters that only grow into amounts a second, since the look before."""

    _before: dict[Any, float] = field(default_factory=dict)
    _at: float = 0.0

    def of(self, counters: dict[Any, float], now: float) -> dict[Any, float]:
        """Return the rates of those counters that were there before; one that was reset has none."""
        before, seconds = self._before, now - self._at
        self._before, self._at = counters, now
        if seconds <= 0:
            return {}
        grown = {name: value - before[name] for name, value in counters.items() if name in before}
        return {name: more / seconds for name, more in grown.items() if more >= 0}


class HostSampler:
    """Samples of this machine. `disk` is a folder whose disk is of interest; ranks are sought below `supervisor`."""

    def __init__(self, disk: Path, *, supervisor: int) -> None:
        self._disk, self._supervisor = disk, supervisor
        self._cores, self._name = psutil.cpu_count() or 1, platform.node()
        self._rates, self._rank_rates = CounterRates(), CounterRates()
        self.sample()  # rates are since this look

    def sample(self) -> dict[str, Any]:
        """Return what is known now; what the kernel does not tell is left out."""
        found: dict[str, Any] = {"host": self._name, "cores": self._cores}
        counters: dict[str, float] = {}
        for part in (_load, _memory, self._space):
            with contextlib.suppress(*GONE):
                found |= part()
        for counted in (_busy_seconds, _disk_bytes, _swap_bytes, _network_bytes, _rdma_bytes):
            with contextlib.suppress(*GONE):
                counters |= counted()
        rates = self._rates.of(counters, time.monotonic())
        if "busy" in rates:
            found["cpu"] = round(min(1.0, rates.pop("busy") / self._cores), 4)
        return found | {name: round(rate) for name, rate in rates.items()} | {"ranks": self._ranks()}

    def _space(self) -> dict[str, Any]:
        return {"disk_free": shutil.disk_usage(self._disk).free}

    def _ranks(self) -> dict[str, dict[str, Any]]:
        """Return what each rank here uses; whoever ends meanwhile is left out."""
        found: dict[str, dict[str, Any]] = {}
        counters: dict[tuple[str, str, int], float] = {}
        with contextlib.suppress(*GONE):
            for rank, what, process in _family(self._supervisor):
                with contextlib.suppress(*GONE), process.oneshot():
                    times = process.cpu_times()
                    counters[rank, what, process.pid] = times.user + times.system
                    if what == "cpu":
                        found[rank] = {"ram": process.memory_info().rss, "threads": process.num_threads()}
        for (rank, what, _), cores in self._rank_rates.of(counters, time.monotonic()).items():
            if rank in found:
                found[rank][what] = round(found[rank].get(what, 0.0) + cores, 3)
        return found


def _family(supervisor: int) -> list[tuple[str, str, psutil.Process]]:
    """Return the ranks below a supervisor (as `cpu`) and what they have started (as `loader_cpu`), with their rank."""
    found: list[tuple[str, str, psutil.Process]] = []
    rank_of: dict[int, str] = {}
    # Parents come before their children: a child whose parent is of a rank is one of its loaders.
    for process in psutil.Process(supervisor).children(recursive=True):
        if process.pid == os.getpid():
            continue  # under torchrun a rank starts the sidecar, which is no loader
        with contextlib.suppress(*GONE):
            parent, called = process.ppid(), RANK.fullmatch(process.name())
            if parent in rank_of:
                rank_of[process.pid] = rank_of[parent]
                found.append((rank_of[parent], "loader_cpu", process))
            elif called:
                rank_of[process.pid] = called[1]
                found.append((called[1], "cpu", process))
    return found


def _load() -> dict[str, Any]:
    return {"load": round(psutil.getloadavg()[0], 2)}


def _memory() -> dict[str, Any]:
    """Return the memory of the machine, or of the container where that may have less."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    total, used = memory.total, memory.total - memory.available
    for limit, usage in CGROUPS:
        with contextlib.suppress(*GONE):
            if (
                most := int(limit.read_text(encoding="ascii"))
            ) < total:  # without a limit: "max", or more than there is
                total, used = most, min(most, int(usage.read_text(encoding="ascii")))
    return {"ram": total, "ram_used": used, "swap_used": swap.used}


def _busy_seconds() -> dict[str, float]:
    times = psutil.cpu_times()
    return {
        "busy": sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    }  # guests are in user


def _disk_bytes() -> dict[str, float]:
    counted = psutil.disk_io_counters()
    return {"disk_read": counted.read_bytes, "disk_written": counted.write_bytes} if counted else {}


def _swap_bytes() -> dict[str, float]:
    """Return what came back from the swap space and what went there (`/proc/vmstat`); of a container nobody tells."""
    counted = psutil.swap_memory()
    return {"swap_read": counted.sin, "swap_written": counted.sout}


def _network_bytes() -> dict[str, float]:
    """Return what came and went over all interfaces but loopback. RDMA passes by these counters."""
    cards = [counted for name, counted in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return {
        "net_received": sum(card.bytes_recv for card in cards),
        "net_sent": sum(card.bytes_sent for card in cards),
    }


def _rdma_bytes() -> dict[str, float]:
    found: dict[str, float] = {}
    for name, file in (("rdma_received", "port_rcv_data"), ("rdma_sent", "port_xmit_data")):
        counted = [int(path.read_text(encoding="ascii")) for path in RDMA.glob(f"*/ports/*/counters/{file}")]
        if counted:
            found[name] = RDMA_WORD * sum(counted)
    return found

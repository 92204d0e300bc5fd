"""This machine as facts: /proc, /sys, the driver's tools and what is installed. Nothing is judged here."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile

import psutil

from trimaran.core import Bytes, Seconds
from trimaran.doctor.machine_facts import DiskFacts, Facts, Gpu, HostFacts, Nic, Versions, Wiring
from trimaran.doctor.nvidia_smi import (
    PEERS,
    QUICK,
    TOPOLOGY,
    WHOLE,
    ask,
    parse_peers,
    parse_quick,
    parse_ways_to_nics,
    parse_whole,
)
from trimaran.hardware import num_cores
from trimaran.hardware.gpu_topology import RATE, parse_topology

WRITE_BYTES = 1 << 26  # that the disk's speed is measured with, at most
WRITE_SECONDS = 2.0
SHM = Path("/dev/shm")


def read_facts(environment: Mapping[str, str], *, quick: bool, gpus: bool = True) -> Facts:
    """Return what there is to know without torch. A quick look starts one program at most, and none without `gpus`."""
    found, driver = (parse_quick(ask(QUICK)) if quick else parse_whole(ask(WHOLE))) if gpus else ((), "")
    found = visible(found, environment.get("CUDA_VISIBLE_DEVICES"))
    wiring = read_wiring(found, links=not quick)
    return Facts(
        environment=environment, versions=read_versions(driver), gpus=found, wiring=wiring, host=read_host(),
    )  # fmt: skip


def visible(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, by number or by the beginning of their UUID, in its order."""
    if chosen is None:
        return gpus
    kept: list[Gpu] = []
    for word in (each.strip() for each in chosen.split(",")):
        match = [gpu for gpu in gpus if word == str(gpu.index) or (len(word) > 4 and gpu.uuid.startswith(word))]
        if not match:
            break  # as CUDA does: what follows something unknown is not there
        kept += match
    return tuple(kept)


def read_versions(driver: str) -> Versions:
    """Return what is installed, from packages and the driver's library; torch is not imported."""
    torch = _installed("torch")
    cuda = re.search(r"\+cu(\d+)(\d)$", torch)
    runtime = next(filter(None, (_installed(f"nvidia-cuda-runtime{each}") for each in ("", "-cu13", "-cu12"))), "")
    nccl = next(filter(None, (_installed(f"nvidia-nccl-cu{each}") for each in (13, 12))), "")
    return Versions(
        torch=torch,
        torch_cuda=f"{cuda[1]}.{cuda[2]}" if cuda else ("" if torch.endswith("+cpu") else runtime),
        nccl=nccl,
        driver=driver,
        driver_cuda=_driver_cuda() if driver else "",
        arch=platform.machine(),
    )


def read_host() -> HostFacts:
    """Return limits, memory and load, and whether two sockets of this machine reach each other."""
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return HostFacts(
        cores=num_cores(),
        memory_free=Bytes(psutil.virtual_memory().available),
        load=os.getloadavg()[0],
        quota=read_quota(),
        shm=Bytes(shm.total) if shm else None,
        shm_free=Bytes(shm.free) if shm else None,
        nofile=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        core=_limit(resource.RLIMIT_CORE),
        core_pattern=_read(Path("/proc/sys/kernel/core_pattern")),
        loopback=try_loopback(),
        clock=Seconds(time.time()),
    )


def read_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' time the container may use; None where there is no limit."""
    told = _read(cgroup / "cpu.max").split()
    if len(told) == 2 and told[0].isdigit() and told[1].isdigit():
        return int(told[0]) / int(told[1])
    quota, period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def read_wiring(gpus: tuple[Gpu, ...], *, links: bool, sys: Path = Path("/sys")) -> Wiring:
    """Return cards and interfaces, and with `links` what the driver says of the ways between GPUs."""
    topology = ask(TOPOLOGY) if links and gpus else ""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = {path.name[4:]: _cores(_read(path / "cpulist")) for path in sys.glob("devices/system/node/node[0-9]*")}
    return Wiring(
        topology=parse_topology(topology) or [],
        peers=parse_peers(ask(PEERS)) if links and len(gpus) > 1 else [],
        to_nics=parse_ways_to_nics(topology),
        nics=read_nics(sys),
        gpu_numa=tuple(_numa(sys / "bus/pci/devices" / _sysfs_bus(gpu.bus)) for gpu in gpus if gpu.bus),
        own_numa=frozenset(int(node) for node, cores in nodes.items() if cores & own),
        interfaces=frozenset(path.name for path in sys.glob("class/net/*")),
    )


def read_nics(sys: Path = Path("/sys")) -> tuple[Nic, ...]:
    """Return the cards that lead out of this machine: InfiniBand and RoCE ports, and Ethernet cards with hardware."""
    fabric = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate, card = RATE.match(_read(port / "rate")), port.parents[1]
        fabric.append(Nic(name=card.name, kind="infiniband", is_up="ACTIVE" in _read(port / "state"),
                          gigabits=float(rate[1]) if rate else 0.0, numa=_numa(card / "device")))  # fmt: skip
    cards = []
    for card in sorted(sys.glob("class/net/*")):
        if (card / "device").exists():
            speed = _read(card / "speed")
            cards.append(Nic(name=card.name, kind="ethernet", is_up=_read(card / "operstate") == "up",
                             gigabits=int(speed) / 1000 if speed.isdigit() else 0.0,
                             numa=_numa(card / "device")))  # fmt: skip
    return (*fabric, *cards)


def read_disk(path: Path, *, measure: bool) -> DiskFacts:
    """Return the disk that `path` is to lie on; with `measure` a file is written there, synced and removed."""
    ground = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
    usage, inodes = shutil.disk_usage(ground), os.statvfs(ground)
    trouble, bandwidth = "", None
    try:
        if measure:
            bandwidth = _write_bandwidth(ground, min(WRITE_BYTES, usage.free // 4))
        else:
            NamedTemporaryFile(dir=ground).close()
    except OSError as error:
        trouble = error.strerror or type(error).__name__
    return DiskFacts(
        path=ground,
        free=Bytes(usage.free),
        total=Bytes(usage.total),
        inodes=inodes.f_favail if inodes.f_files else None,  # some file systems count none
        trouble=trouble,
        bandwidth=bandwidth,
    )


def try_loopback() -> str:
    """Return '' when a socket of this machine reaches another, else what was said."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens at the port already, so that we could not."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _write_bandwidth(folder: Path, num_bytes: int) -> float:
    block, written = os.urandom(1 << 20), 0  # what a disk could compress would be no measure
    with NamedTemporaryFile(dir=folder, prefix=".trimaran-doctor-") as file:
        start = time.perf_counter()
        while written < max(num_bytes, len(block)) and time.perf_counter() - start < WRITE_SECONDS:
            file.write(block)
            written += len(block)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - start)


def _driver_cuda() -> str:
    """Return the newest CUDA that the driver's library knows: what a program would load, not what a tool was built for.

    The driver is asked for a number only; no device is opened.
    """
    number = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _numa(device: Path) -> int:
    text = _read(device / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def _sysfs_bus(bus: str) -> str:
    """Return `00000000:01:00.0`, as the driver's tool has it, the way Linux does: `0000:01:00.0`."""
    return bus[-12:].lower()


def _cores(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        with contextlib.suppress(ValueError):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

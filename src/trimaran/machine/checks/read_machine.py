"""Reads facts about this machine from /proc, /sys, nvidia-smi and installed packages. The checks judge them."""

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
from trimaran.machine.checks.machine_facts import (
    DiskFacts,
    Facts,
    Gpu,
    HostFacts,
    Interconnect,
    ProcessLimits,
    Versions,
)
from trimaran.machine.detect import num_cores
from trimaran.machine.gpus import (
    FULL_QUERY,
    PEER_MATRIX,
    SHORT_QUERY,
    TOPOLOGY_MATRIX,
    parse_full_query,
    parse_gpu_nic_paths,
    parse_peers,
    parse_short_query,
    parse_topology,
    read_nics,
    run_driver_tool,
)
from trimaran.machine.host_limits import cpu_quota, free_tasks, numa_node_of, numa_nodes, pci_device, read_text

MAX_WRITE_BYTES = 1 << 26  # of the file that measures the disk's speed
MAX_WRITE_SECONDS = 2.0
SHM = Path("/dev/shm")


def read_facts(environment: Mapping[str, str], *, quick: bool, gpus: bool = True) -> Facts:
    """Return everything that is known without torch. `quick` starts one program at most, and none without `gpus`."""
    found: tuple[Gpu, ...] = ()
    driver = ""
    if gpus:
        parse, query = (parse_short_query, SHORT_QUERY) if quick else (parse_full_query, FULL_QUERY)
        found, driver = parse(run_driver_tool(query))
    found = visible(found, environment.get("CUDA_VISIBLE_DEVICES"))
    torch = _installed("torch")
    cuda = re.search(r"\+cu(\d+)(\d)$", torch)
    runtime = next(filter(None, (_installed(f"nvidia-cuda-runtime{each}") for each in ("", "-cu13", "-cu12"))), "")
    nccl = next(filter(None, (_installed(f"nvidia-nccl-cu{each}") for each in (13, 12))), "")
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return Facts(
        environment=environment,
        versions=Versions(
            torch=torch,
            torch_cuda=f"{cuda[1]}.{cuda[2]}" if cuda else ("" if torch.endswith("+cpu") else runtime),
            nccl=nccl,
            driver=driver,
            driver_cuda=_driver_cuda() if driver else "",
            arch=platform.machine(),
        ),
        gpus=found,
        interconnect=read_interconnect(found, links=not quick),
        host=HostFacts(
            cores=num_cores(),
            memory_free=Bytes(psutil.virtual_memory().available),
            load=os.getloadavg()[0],
            quota=cpu_quota(),
            shm=Bytes(shm.total) if shm else None,
            shm_free=Bytes(shm.free) if shm else None,
            nofile=_limit(resource.RLIMIT_NOFILE, hard=True),
            memlock=_limit(resource.RLIMIT_MEMLOCK),
            core=_limit(resource.RLIMIT_CORE),
            core_pattern=read_text(Path("/proc/sys/kernel/core_pattern")),
            loopback=try_loopback(),
            clock=Seconds(time.time()),
        ),
        limits=ProcessLimits(
            processes=_free_processes(),
            address_bytes=_limit(resource.RLIMIT_AS),
            file_bytes=_limit(resource.RLIMIT_FSIZE),
        ),
    )


def visible(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, by index or by UUID prefix, in its order."""
    if chosen is None:
        return gpus
    selected: list[Gpu] = []
    for name in (each.strip() for each in chosen.split(",")):
        match = [gpu for gpu in gpus if name == str(gpu.index) or (len(name) > 4 and gpu.uuid.startswith(name))]
        if not match:
            break  # as CUDA does: it ignores everything after an unknown entry
        selected += match
    return tuple(selected)


def read_interconnect(gpus: tuple[Gpu, ...], *, links: bool, sys: Path = Path("/sys")) -> Interconnect:
    """Return network cards and interfaces, and with `links` the driver's GPU topology."""
    topology = run_driver_tool(TOPOLOGY_MATRIX) if links and gpus else ""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return Interconnect(
        topology=parse_topology(topology) or [],
        peers=parse_peers(run_driver_tool(PEER_MATRIX)) if links and len(gpus) > 1 else [],
        gpu_nic_paths=parse_gpu_nic_paths(topology),
        nics=read_nics(sys),
        gpu_numa=tuple(numa_node_of(pci_device(gpu.bus, sys)) for gpu in gpus if gpu.bus),
        allowed_numa=frozenset(node for node, cores in numa_nodes(sys).items() if cores & own),
        interfaces=frozenset(path.name for path in sys.glob("class/net/*")),
    )


def read_disk(path: Path, *, measure: bool) -> DiskFacts:
    """Return the disk that will hold `path`. With `measure`, a file is written there, synced and removed."""
    folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
    usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
    write_error, bandwidth = "", None
    try:
        if measure:
            block, written = os.urandom(1 << 20), 0  # random, because a file system may compress
            most = max(min(MAX_WRITE_BYTES, usage.free // 4), len(block))
            with NamedTemporaryFile(dir=folder, prefix=".trimaran-doctor-") as file:
                start = time.perf_counter()
                while written < most and time.perf_counter() - start < MAX_WRITE_SECONDS:
                    file.write(block)
                    written += len(block)
                file.flush()
                os.fsync(file.fileno())
                bandwidth = written / (time.perf_counter() - start)
        else:
            NamedTemporaryFile(dir=folder).close()
    except OSError as error:
        write_error = error.strerror or type(error).__name__
    return DiskFacts(
        path=folder,
        free=Bytes(usage.free),
        total=Bytes(usage.total),
        inodes=inodes.f_favail if inodes.f_files else None,  # some file systems do not count inodes
        write_error=write_error,
        bandwidth=bandwidth,
    )


def try_loopback() -> str:
    """Return '' if two sockets of this machine can connect, else the error."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_port_in_use(host: str, port: int) -> bool:
    """Whether another process already listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _driver_cuda() -> str:
    """Return the newest CUDA that libcuda.so supports, which counts for a program; no device is opened."""
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


def _limit(kind: int, *, hard: bool = False) -> int | None:
    limit = resource.getrlimit(kind)[1 if hard else 0]
    return None if limit == resource.RLIM_INFINITY else limit


def _free_processes() -> int | None:
    """Return how many processes and threads may still start here; None if there is no limit.

    That of a user does not hold for root; that of a container does.
    """
    limit, user, tasks = _limit(resource.RLIMIT_NPROC, hard=True), os.getuid(), free_tasks()
    if limit is None or user == 0:
        return tasks
    running = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            running += process.num_threads() if process.uids().real == user else 0
    left = max(0, limit - running)
    return left if tasks is None else min(left, tasks)

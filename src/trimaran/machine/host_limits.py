"""What this process may use of its machine: memory and CPU quota of its container, NUMA nodes, OpenMP threads.

A container's limits are those of cgroup v2 or v1. A memory limit may also be that of a control group inside of it, such
as the group of a Slurm job. A missing file and a value without a limit (`max` in v2, -1 or a huge number in v1) both
mean: no limit. Imports no torch.
"""

import contextlib
import re
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# The controller's folder, the file names of limit and usage, and the page cache counters of memory.stat: v2, then v1.
MEMORY_FILES = (
    ("", "memory.max", "memory.current", ("file", "shmem")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache", "total_shmem")),
)
SYS = Path("/sys")
UNKNOWN_NODE = -1
MAX_THREADS = 4096  # of one process; more is a mistake, and the threads could not all be started


def total_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the memory of this host, or the limit of its container where that is less."""
    total = psutil.virtual_memory().total
    return min([total, *(each.limit for each in _memory_limits(cgroup, membership))])


def total_and_used_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> tuple[int, int]:
    """Return total and used memory of this host, or of its container (with page cache) where that has a lower limit."""
    memory = psutil.virtual_memory()
    total, used = memory.total, memory.total - memory.available
    for each in _memory_limits(cgroup, membership):
        if each.limit < total and each.usage is not None:
            total, used = each.limit, min(each.limit, each.usage)
    return total, used


def free_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the free memory of this host, or less if its container has less. Page cache counts as free, not shmem."""
    free = psutil.virtual_memory().available
    for each in _memory_limits(cgroup, membership):
        if each.usage is not None and each.cache is not None and each.shmem is not None:
            free = min(free, max(0, each.limit - (each.usage - each.cache + each.shmem)))
    return free


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores' time the container may use; None without a limit."""
    quota, _, period = read_text(cgroup / "cpu.max").partition(" ")
    if not period:
        quota, period = read_text(cgroup / "cpu/cpu.cfs_quota_us"), read_text(cgroup / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def free_tasks(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many more processes and threads the container may start; None without a limit."""
    pairs = [(_number(group / "pids.max"), _number(group / "pids.current"))
             for controller in ("", "pids") for group in _groups(controller, cgroup, membership)]  # fmt: skip
    return min((max(0, limit - used) for limit, used in pairs if limit is not None and used is not None), default=None)


def count_oom_kills(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes of this control group the kernel's OOM killer has ended; 0 where unknown."""
    groups = [line.split(":", 2)[1:] for line in read_text(membership).splitlines()]
    files = [cgroup / path.lstrip("/") / "memory.events" for controllers, path in groups if not controllers]
    # cgroup v1 has a folder for each controller.
    v1_paths = [path for controllers, path in groups if "memory" in controllers.split(",")]
    files += [cgroup / "memory" / path.lstrip("/") / "memory.oom_control" for path in v1_paths]
    return sum(_counters(file).get("oom_kill", 0) for file in files)


class MemoryLimit(NamedTuple):
    """The limit of a control group, and what of it is used, in bytes; None if unknown."""

    limit: int
    usage: int | None
    cache: int | None
    shmem: int | None


def _memory_limits(cgroup: Path, membership: Path) -> list[MemoryLimit]:
    """Return each memory limit that is set, of the root and of the groups in it that this process belongs to."""
    found = []
    for controller, limit_file, usage_file, (cache, shmem) in MEMORY_FILES:
        for group in _groups(controller, cgroup, membership):
            if (limit := _number(group / limit_file)) is not None:
                stat = _counters(group / "memory.stat")
                found.append(MemoryLimit(limit, _number(group / usage_file), stat.get(cache), stat.get(shmem)))
    return found


def _groups(controller: str, cgroup: Path, membership: Path) -> list[Path]:
    """Return the root of a controller and the groups in it that this process belongs to; "" is cgroup v2."""
    memberships = [line.split(":", 2)[1:] for line in read_text(membership).splitlines()]
    paths = [path for controllers, path in memberships if controller in controllers.split(",")]
    groups = {cgroup / controller}
    for parts in (path.strip("/").split("/") for path in paths):
        if ".." not in parts:  # in a container without its own namespace the path is the host's, and not there
            groups |= {cgroup.joinpath(controller, *parts[:count]) for count in range(1, len(parts) + 1)}
    return sorted(groups)


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() else None


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_text(path: Path) -> str:
    """Return a small file of the kernel; '' if it cannot be read, as the speed of a card that is down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def numa_nodes(sys: Path = SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node; empty if Linux does not say."""
    folders = sys.glob("devices/system/node/node[0-9]*")
    return {int(folder.name[4:]): frozenset(parse_cores(read_text(folder / "cpulist"))) for folder in folders}


def numa_node_of(device: Path) -> int:
    """Return the NUMA node of a device, given its folder in sysfs; UNKNOWN_NODE if it has none."""
    text = read_text(device / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else UNKNOWN_NODE


def pci_device(bus: str, sys: Path = SYS) -> Path:
    """Return the folder of a PCI device. nvidia-smi writes `00000000:01:00.0`, sysfs `0000:01:00.0`."""
    return sys / "bus/pci/devices" / bus[-12:].lower()


def cores_near(device: Path, allowed: Set[int], sys: Path = SYS) -> frozenset[int]:
    """Return those of the allowed cores that are on the NUMA node of a device; empty if there is nothing to choose.

    There is nothing to choose if the device's node is not known or has no allowed core, or if all allowed cores are on
    one node: the machine has no other, or somebody has bound this process already.
    """
    nodes = numa_nodes(sys)
    if sum(bool(cores & allowed) for cores in nodes.values()) < 2:
        return frozenset()
    return nodes.get(numa_node_of(device), frozenset()) & allowed


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        with contextlib.suppress(ValueError):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def openmp_threads(value: str | None) -> int | None:
    """Return the threads of the outermost level, the one that torch uses.

    None if the variable is not set, empty or not valid. OpenMP ignores a list with any part that is not positive.
    """
    parts = [part.strip() for part in (value or "").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 and int(part) > 0 for part in parts):
        return None
    return int(parts[0]) if int(parts[0]) <= MAX_THREADS else None

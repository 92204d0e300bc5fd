"""The memory limit, CPU quota and OOM kills of this process's container, from cgroup v2 or v1. Imports no torch.

A memory limit may also be that of a control group inside of it, such as the group of a Slurm job.
A missing file and a value without a limit (`max` in v2, -1 or a huge number in v1) both mean: no limit.
"""

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


def total_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the memory of this host, or the limit of its container where that is less."""
    total = psutil.virtual_memory().total
    return min([total, *(each.limit for each in _memory_limits(cgroup, membership))])


def total_and_used_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> tuple[int, int]:
    """Return the memory of this host and how much of it is used; of its container where that has a lower limit.

    The usage of a container includes its page cache.
    """
    memory = psutil.virtual_memory()
    total, used = memory.total, memory.total - memory.available
    for each in _memory_limits(cgroup, membership):
        if each.limit < total and each.usage is not None:
            total, used = each.limit, min(each.limit, each.usage)
    return total, used


def free_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the free memory of this host, or of its container where that has less.

    Page cache counts as free, because the kernel drops it on demand; shared memory does not.
    """
    free = psutil.virtual_memory().available
    for each in _memory_limits(cgroup, membership):
        if each.usage is not None and each.cache is not None and each.shmem is not None:
            free = min(free, max(0, each.limit - (each.usage - each.cache + each.shmem)))
    return free


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores' time the container may use; None without a limit."""
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def free_tasks(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many more processes and threads the container may start; None without a limit."""
    pairs = [(_number(group / "pids.max"), _number(group / "pids.current"))
             for controller in ("", "pids") for group in _groups(controller, cgroup, membership)]  # fmt: skip
    return min((max(0, limit - used) for limit, used in pairs if limit is not None and used is not None), default=None)


def count_oom_kills(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes of this control group the kernel's OOM killer has ended; 0 where unknown."""
    groups = [line.split(":", 2)[1:] for line in _read(membership).splitlines()]
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
    memberships = [line.split(":", 2)[1:] for line in _read(membership).splitlines()]
    paths = [path for controllers, path in memberships if controller in controllers.split(",")]
    # In a container without its own namespace the path is the host's, and does not exist here.
    return sorted(
        {cgroup / controller} | {cgroup / controller / part for path in paths for part in _with_parents(path)}
    )


def _with_parents(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)] if ".." not in parts else []


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""The memory limit, CPU quota and OOM kills of this process's container, from cgroup v2 or v1. Imports no torch.

A missing file and a value without a limit (`max` in v2, -1 or a huge number in v1) both mean: no limit.
"""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# File names of the limit and the usage, and the page cache counter of memory.stat: first v2, then v1.
MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", ("file", "shmem")),
    (
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
        ("total_cache", "total_shmem"),
    ),
)  # fmt: skip


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of this host, or the limit of its container where that is less."""
    total = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _memory_limits(cgroup))])


def total_and_used_bytes(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Return the memory of this host and how much of it is used; of its container where that has a lower limit.

    The usage of a container includes its page cache.
    """
    memory = psutil.virtual_memory()
    total, used = memory.total, memory.total - memory.available
    for limit, files in _memory_limits(cgroup):
        usage = _number(cgroup / files[1])
        if limit < total and usage is not None:
            total, used = limit, min(limit, usage)
    return total, used


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Return the free memory of this host, or of its container where that has less.

    Page cache counts as free, because the kernel drops it on demand; shared memory does not.
    """
    free = psutil.virtual_memory().available
    for limit, (_, usage_file, stat_file, (cache, shmem)) in _memory_limits(cgroup):
        usage, stat = _number(cgroup / usage_file), _counters(cgroup / stat_file)
        if usage is not None and cache in stat and shmem in stat:
            free = min(free, max(0, limit - (usage - stat[cache] + stat[shmem])))
    return free


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many cores' time the container may use; None without a limit."""
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def count_oom_kills(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes of this control group the kernel's OOM killer has ended; 0 where unknown."""
    groups = [line.split(":", 2)[1:] for line in _read(membership).splitlines()]
    files = [cgroup / path.lstrip("/") / "memory.events" for controllers, path in groups if not controllers]
    # cgroup v1 has a folder for each controller.
    v1_paths = [path for controllers, path in groups if "memory" in controllers.split(",")]
    files += [cgroup / "memory" / path.lstrip("/") / "memory.oom_control" for path in v1_paths]
    return sum(_counters(file).get("oom_kill", 0) for file in files)


def _memory_limits(cgroup: Path) -> list[tuple[int, tuple[str, str, str, tuple[str, str]]]]:
    """Return each memory limit that is set, with the names of its files."""
    limits = [(_number(cgroup / files[0]), files) for files in MEMORY_FILES]
    return [(limit, files) for limit, files in limits if limit is not None]


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

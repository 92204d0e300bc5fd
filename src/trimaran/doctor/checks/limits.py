"""H009: ulimits for open files, locked memory and core dumps."""

from trimaran.core import show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H009", "limits")
# Open files. Below the first a rank cannot finish its imports; below the second many ranks or shards run out.
FAIL_OPEN_FILES, WARN_OPEN_FILES = 64, 1024
MIN_LOCKED_BYTES = 1 << 30  # that InfiniBand locks for its buffers


def check(facts: Facts) -> CheckResult:
    """List the limits that are too low, or so high that a crash fills the disk."""
    host, nics = facts.host, facts.interconnect.nics if facts.interconnect else ()
    problems: list[Problem] = []
    if host.nofile is not None and host.nofile < WARN_OPEN_FILES:
        problems.append(Problem(f"only {host.nofile} files may be open at once", "ulimit -n 65536",
                                is_fatal=host.nofile < FAIL_OPEN_FILES))  # fmt: skip
    has_infiniband = any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    if has_infiniband and host.memlock is not None and host.memlock < MIN_LOCKED_BYTES:
        problems.append(Problem(f"only {show_bytes(host.memlock)} may be locked, too little for InfiniBand",
                                "ulimit -l unlimited; Docker: --ulimit memlock=-1"))  # fmt: skip
    if host.core is None and host.core_pattern and not host.core_pattern.startswith("|"):
        problems.append(Problem("core dumps have no size limit: a rank that crashes writes all of its memory to disk",
                                "ulimit -c 0"))  # fmt: skip
    files = "unlimited" if host.nofile is None else f"{host.nofile:,}"
    locked = "unlimited" if host.memlock is None else show_bytes(host.memlock)
    return INFO.worst(problems, f"{files} open files, {locked} locked memory", nofile=host.nofile, memlock=host.memlock)

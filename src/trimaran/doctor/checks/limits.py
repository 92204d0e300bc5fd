"""Limits of the shell: open files, locked memory, core dumps."""

from trimaran.core import show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H009", "limits")
# Open files: below the first no rank gets through its imports; below the second many ranks or shards run out.
LEAST_FILES, ENOUGH_FILES = 64, 1024
LOCKED_BYTES = 1 << 30  # that InfiniBand wants to lock for its buffers, at least


def check(facts: Facts) -> CheckResult:
    """Say which limits are too low, or so high that a crash fills the disk."""
    host, nics = facts.host, facts.wiring.nics if facts.wiring else ()
    troubles: list[Trouble] = []
    if host.nofile is not None and host.nofile < ENOUGH_FILES:
        troubles.append(Trouble(f"only {host.nofile} files may be open at once", "ulimit -n 65536",
                                is_fatal=host.nofile < LEAST_FILES))  # fmt: skip
    fabric = any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    if fabric and host.memlock is not None and host.memlock < LOCKED_BYTES:
        troubles.append(Trouble(f"only {show_bytes(host.memlock)} may be locked, too little for InfiniBand",
                                "ulimit -l unlimited; Docker: --ulimit memlock=-1"))  # fmt: skip
    if host.core is None and host.core_pattern and not host.core_pattern.startswith("|"):
        troubles.append(Trouble("a rank that crashes writes all of its memory into a file (core dumps have no limit)",
                                "ulimit -c 0"))  # fmt: skip
    files = "any number of" if host.nofile is None else f"{host.nofile:,}"
    locked = "any amount of" if host.memlock is None else show_bytes(host.memlock)
    return LOOK.worst(troubles, f"{files} open files, {locked} locked memory", nofile=host.nofile, memlock=host.memlock)

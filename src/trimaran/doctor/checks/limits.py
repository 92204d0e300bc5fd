"""H009: ulimits for open files, processes, address space, file size, locked memory and core dumps."""

from trimaran.core import GIB, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Problem
from trimaran.doctor.machine_facts import Facts, HostFacts, ProcessLimits, RunRequirements

INFO = CheckInfo("H009", "limits")
WARN_OPEN_FILES = 1024
MIN_LOCKED_BYTES = 1 << 30  # that InfiniBand locks for its buffers
MIN_FILE_BYTES = 1 << 20  # logs and metrics alone are larger
MIN_ADDRESS_BYTES = 1.9 * GIB  # of one rank of a tiny run on a CPU; measured with torch 2.13: mostly libraries
# Measured peaks of tiny runs: 38 files and 7 threads of one rank alone; 93, 115, 121 and 129 files and 46 to 58 threads
# of a rank of dp 2, dp 4, tp 2 x pp 2 and dp 8, most of them for gloo's connections to the other ranks.
FILES_ALONE, FILES_AMONG_OTHERS, FILES_PER_RANK = 40, 84, 5
THREADS_ALONE, THREADS_AMONG_OTHERS = 16, 46
RAISE = "in the job script, in /etc/security/limits.conf, or for a container with"


def check(facts: Facts) -> CheckResult:
    """List the limits that are too low, or so high that a crash fills the disk."""
    host = facts.host
    problems = [*_open_files(host, facts.requirements), *_processes(facts.limits, facts.requirements)]
    problems += [*_sizes(facts.limits), *_locked_memory(facts)]
    if host.core is None and host.core_pattern and not host.core_pattern.startswith("|"):
        problems.append(Problem("core dumps have no size limit: a rank that crashes writes all of its memory to disk",
                                "ulimit -c 0"))  # fmt: skip
    files = "unlimited" if host.nofile is None else f"{host.nofile:,}"
    locked = "unlimited" if host.memlock is None else show_bytes(host.memlock)
    return INFO.worst(problems, f"{files} open files, {locked} locked memory", nofile=host.nofile, memlock=host.memlock)


def files_per_rank(ranks: int) -> int:
    """Return how many files a rank opens at least: libraries, logs, and connections to the other ranks."""
    return FILES_ALONE if ranks == 1 else FILES_AMONG_OTHERS + FILES_PER_RANK * ranks


def _open_files(host: HostFacts, needs: RunRequirements | None) -> list[Problem]:
    ranks = needs.ranks if needs else 1
    needed, fix = files_per_rank(ranks), f"ulimit -n 65536; {RAISE} --ulimit nofile=65536"
    if host.nofile is None or host.nofile >= max(WARN_OPEN_FILES, 2 * needed):
        return []
    what = f"only {host.nofile} files may be open at once"
    if host.nofile >= needed:
        return [Problem(what, fix)]
    which = f"a rank of {ranks}" if ranks > 1 else "a rank"
    return [Problem(f"{what}, and {which} opens at least {needed}", fix, is_fatal=True)]


def _processes(limits: ProcessLimits, needs: RunRequirements | None) -> list[Problem]:
    ranks, ranks_here = (needs.ranks, needs.ranks_here) if needs else (1, 1)
    needed = THREADS_ALONE if ranks == 1 else THREADS_AMONG_OTHERS * ranks_here
    if limits.processes is None or limits.processes >= 2 * needed:
        return []
    what = f"only {limits.processes} more processes and threads may start here, and the run starts at least {needed}"
    fix = f"ulimit -u unlimited; {RAISE} --ulimit nproc=-1 --pids-limit=-1"
    return [Problem(what, fix, is_fatal=limits.processes < needed)]


def _sizes(limits: ProcessLimits) -> list[Problem]:
    """Return the problems with the limits of the address space and of the size of a file."""
    found = []
    if limits.address_bytes is not None:
        what = f"a process may have only {show_bytes(limits.address_bytes)} of address space"
        found.append(Problem(f"{what}; torch alone maps about {show_bytes(MIN_ADDRESS_BYTES)}", "ulimit -v unlimited",
                             is_fatal=limits.address_bytes < MIN_ADDRESS_BYTES))  # fmt: skip
    if limits.file_bytes is not None:
        what = f"a file may have at most {show_bytes(limits.file_bytes)}: larger checkpoints cannot be written"
        found.append(Problem(what, "ulimit -f unlimited", is_fatal=limits.file_bytes < MIN_FILE_BYTES))
    return found


def _locked_memory(facts: Facts) -> list[Problem]:
    host, nics = facts.host, facts.interconnect.nics if facts.interconnect else ()
    has_infiniband = any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    if not has_infiniband or host.memlock is None or host.memlock >= MIN_LOCKED_BYTES:
        return []
    return [Problem(f"only {show_bytes(host.memlock)} may be locked, too little for InfiniBand",
                    "ulimit -l unlimited; Docker: --ulimit memlock=-1")]  # fmt: skip

"""Checks of the host: limits, cores, memory, disks and ports."""

import math

from trimaran.core import GIB, show_bytes, show_seconds
from trimaran.machine.checks.machine_facts import CheckInfo, CheckResult, Facts, Problem, RunRequirements

WARN_OPEN_FILES = 1024
MIN_LOCKED_BYTES = 1 << 30  # that InfiniBand locks for its buffers
MIN_FILE_BYTES = 1 << 20  # logs and metrics alone are larger
MIN_ADDRESS_BYTES = 1.9 * GIB  # of one rank of a tiny run on a CPU; measured with torch 2.13: mostly libraries
# Measured peaks of tiny runs: 38 files and 7 threads of one rank alone; 93, 115, 121 and 129 files and 46 to 58 threads
# of a rank of dp 2, dp 4, tp 2 x pp 2 and dp 8, most of them for gloo's connections to the other ranks.
FILES_ALONE, FILES_AMONG_OTHERS, FILES_PER_RANK = 40, 84, 5
THREADS_ALONE, THREADS_AMONG_OTHERS = 16, 46
RAISE = "in the job script, in /etc/security/limits.conf, or for a container with"


def process_limits(facts: Facts) -> CheckResult:
    """List the limits that are too low, or so high that a crash fills the disk."""
    info = CheckInfo("H009", "limits")
    host, limits, needs = facts.host, facts.limits, facts.requirements or RunRequirements()
    problems: list[Problem] = []
    needed = FILES_ALONE if needs.ranks == 1 else FILES_AMONG_OTHERS + FILES_PER_RANK * needs.ranks
    if host.nofile is not None and host.nofile < max(WARN_OPEN_FILES, 2 * needed):
        what, is_fatal = f"only {host.nofile} files may be open at once", host.nofile < needed
        if is_fatal:
            what += f", and a rank {f'of {needs.ranks} ' if needs.ranks > 1 else ''}opens at least {needed}"
        problems.append(Problem(what, f"ulimit -n 65536; {RAISE} --ulimit nofile=65536", is_fatal))
    needed = THREADS_ALONE if needs.ranks == 1 else THREADS_AMONG_OTHERS * needs.ranks_here
    if limits.processes is not None and limits.processes < 2 * needed:
        what = f"only {limits.processes} more processes and threads may start here"
        problems.append(Problem(f"{what}, and the run starts at least {needed}",
                                f"ulimit -u unlimited; {RAISE} --ulimit nproc=-1 --pids-limit=-1",
                                is_fatal=limits.processes < needed))  # fmt: skip
    if limits.address_bytes is not None:
        what = f"a process may have only {show_bytes(limits.address_bytes)} of address space; torch alone maps about "
        what += show_bytes(MIN_ADDRESS_BYTES)
        problems.append(Problem(what, "ulimit -v unlimited", is_fatal=limits.address_bytes < MIN_ADDRESS_BYTES))
    if limits.file_bytes is not None:
        what = f"a file may have at most {show_bytes(limits.file_bytes)}: larger checkpoints cannot be written"
        problems.append(Problem(what, "ulimit -f unlimited", is_fatal=limits.file_bytes < MIN_FILE_BYTES))
    nics = facts.interconnect.nics if facts.interconnect else ()
    has_infiniband = any(nic.kind == "infiniband" and nic.is_up for nic in nics)
    if has_infiniband and host.memlock is not None and host.memlock < MIN_LOCKED_BYTES:
        problems.append(Problem(f"only {show_bytes(host.memlock)} may be locked, too little for InfiniBand",
                                "ulimit -l unlimited; Docker: --ulimit memlock=-1"))  # fmt: skip
    if host.core is None and host.core_pattern and not host.core_pattern.startswith("|"):
        problems.append(Problem("core dumps have no size limit: a rank that crashes writes all of its memory to disk",
                                "ulimit -c 0"))  # fmt: skip
    files = "unlimited" if host.nofile is None else f"{host.nofile:,}"
    locked = "unlimited" if host.memlock is None else show_bytes(host.memlock)
    return info.worst(problems, f"{files} open files, {locked} locked memory", nofile=host.nofile, memlock=host.memlock)


def cpu_cores(facts: Facts) -> CheckResult:
    """Report whether this process can really use the cores that it sees."""
    info = CheckInfo("H019", "cores")
    host = facts.host
    problems: list[Problem] = []
    if host.quota is not None and host.quota < host.cores - 0.5:
        problems.append(Problem(f"the container's CPU quota is {host.quota:.2g} of the {host.cores} cores it sees: "
                                "its threads are throttled", "raise the quota (docker --cpus, Kubernetes limits), or "
                                f"use fewer ranks: --set cluster={max(1, int(host.quota))}xcpu"))  # fmt: skip
    if host.load > 1.5 * host.cores:
        problems.append(Problem(f"the load average is {host.load:.1f} on {host.cores} cores",
                                "see `top`: measurements and the run will be slower"))  # fmt: skip
    return info.worst(problems, f"{host.cores} cores, {host.load:.1f} in use", cores=host.cores, load=host.load)


def plan_memory(facts: Facts) -> CheckResult:
    """Report whether the plan fits. It fails only if even the low end of the prediction does not.

    On a CPU it never fails, because other programs may free host memory at any time.
    """
    info = CheckInfo("H014", "memory for the plan")
    requirements = facts.requirements
    if requirements is None:
        return info.skipped("name a recipe with --recipe")
    if requirements.refusal:
        return info.fail(requirements.refusal, requirements.remedy)
    gpus = facts.gpus[: requirements.ranks_here]
    free: int | None = None  # of the fullest device of the run
    if not requirements.needs_gpus:
        free = facts.host.memory_free // requirements.ranks_here
    elif gpus and all(gpu.memory for gpu in gpus):
        free = min(gpu.memory - gpu.used for gpu in gpus)
    if free is None or not requirements.device_bytes:
        return info.skipped("the driver reports no free memory" if free is None else "the plan has no prediction")
    need, low = requirements.device_bytes, requirements.device_bytes * (1 - requirements.error)
    kind = "GPU" if requirements.needs_gpus else "rank"
    what = f"the plan needs {show_bytes(need)} per {kind}, {show_bytes(free)} are free"
    evidence = {"need": need, "free": free, "error": requirements.error}
    if low > free and requirements.needs_gpus:
        fix = "stop other programs on the GPUs (`nvidia-smi`), or make a plan that needs less: `trimaran plan`"
        return info.fail(what, fix, **evidence)
    if need > free:
        return info.warn(f"{what}, which is within the error of the prediction" if low <= free else what,
                         "stop other programs, or make a plan that needs less: `trimaran plan`",
                         **evidence)  # fmt: skip
    return info.passed(what, **evidence)


MIN_SHM_BYTES = 1 * GIB


def shared_memory(facts: Facts) -> CheckResult:
    """Report whether /dev/shm is large enough. Trimaran's own loaders and checkpoints do not use it."""
    info = CheckInfo("H008", "/dev/shm")
    size, free = facts.host.shm, facts.host.shm_free
    if size is None or free is None:
        return info.skipped("there is no /dev/shm here")
    if len(facts.gpus) > 1 and free < MIN_SHM_BYTES:
        what = f"{show_bytes(free)} free of {show_bytes(size)}, and NCCL needs about {show_bytes(MIN_SHM_BYTES)}"
        fix = ("start the container with --shm-size=16g or --ipc=host; "
               "outside a container: mount -o remount,size=16G /dev/shm")  # fmt: skip
        return info.warn(f"{what} for {len(facts.gpus)} GPUs", fix, free=free, size=size)
    return info.passed(f"{show_bytes(free)} free of {show_bytes(size)}", free=free, size=size)


MIN_FREE_BYTES = 10 * GIB  # without a recipe that says how much the run writes
MIN_FREE_INODES = 10_000


def disk_space(facts: Facts) -> CheckResult:
    """Report whether everything the run writes fits on the disk."""
    info = CheckInfo("H010", "disk space")
    disk, requirements = facts.disk, facts.requirements
    if disk is None:
        return info.skipped("the disk was not checked")
    where, free = str(disk.path), show_bytes(disk.free)
    if disk.write_error:
        return info.fail(f"cannot write to {where}: {disk.write_error}", "choose another folder: --run-dir DIR")
    if disk.inodes is not None and disk.inodes < MIN_FREE_INODES:
        return info.warn(f"{where} has only {disk.inodes:,} free inodes", "delete small files there")
    if requirements and requirements.disk_bytes > disk.free:
        fix = "free disk space, choose another disk with --run-dir DIR, or --set checkpoint.keep=1"
        need = show_bytes(requirements.disk_bytes)
        return info.fail(f"checkpoints and weights need {need}, {where} has {free} free", fix)
    if requirements and requirements.disk_bytes:
        need = show_bytes(requirements.disk_bytes)
        return info.passed(f"{free} free at {where}, the run writes {need}", free=disk.free)
    if disk.free < MIN_FREE_BYTES:
        fix = "free disk space, or name a recipe with --recipe for an exact check"
        return info.warn(f"{free} free at {where}", fix)
    return info.passed(f"{free} free at {where}", free=disk.free)


MIN_BYTES_PER_SECOND = 50e6  # without a recipe: slower than a laptop's disk
# Fractions of the time between two checkpoints that a write takes: beyond the first we warn, at 1.0 saves fall behind.
WARN_FRACTION, SATURATED_FRACTION = 0.5, 1.0


def disk_speed(facts: Facts) -> CheckResult:
    """Compare the time to write the recipe's checkpoint with the time between two of them."""
    info = CheckInfo("H011", "disk speed")
    if facts.disk is None or facts.disk.bandwidth is None:
        return info.skipped("--quick writes nothing")
    rate, requirements = facts.disk.bandwidth, facts.requirements
    what = f"{show_bytes(rate)}/s with fsync"
    if requirements is None or not requirements.checkpoint_bytes:
        if rate < MIN_BYTES_PER_SECOND:
            return info.warn(f"{what} at {facts.disk.path}", "put runs on a faster disk: --run-dir DIR", rate=rate)
        return info.passed(what, rate=rate)
    seconds, interval = requirements.checkpoint_bytes / rate, requirements.interval
    what = f"a checkpoint of {show_bytes(requirements.checkpoint_bytes)} takes {show_seconds(seconds)} at {what}"
    if interval and seconds > WARN_FRACTION * interval:
        what = f"{what}, and one is due every {show_seconds(interval)}"
        if seconds >= SATURATED_FRACTION * interval:
            what = f"{what}: saves cannot keep up"
        every = math.ceil(requirements.every * seconds / (WARN_FRACTION * interval))
        fix = f"save less often: --set checkpoint.every={every}, or put runs on a faster disk"
        return info.warn(what, fix, rate=rate)
    return info.passed(what, rate=rate, seconds=seconds)


def ports(facts: Facts) -> CheckResult:
    """Report whether processes reach each other over loopback, and whether the recipe's ports are free."""
    info = CheckInfo("H013", "ports")
    if facts.host.loopback:
        return info.fail(f"processes cannot reach each other over loopback: {facts.host.loopback}",
                         "ip link set lo up; check the firewall's rules for lo")  # fmt: skip
    taken = facts.requirements.ports if facts.requirements else ()
    if taken:
        ports = ", ".join(map(str, taken))
        return info.warn(f"port {ports}, which the recipe's telemetry uses, is taken by another process",
                         f"choose another: --set telemetry.prometheus.port={taken[0] + 1}")  # fmt: skip
    return info.passed("processes reach each other over loopback")

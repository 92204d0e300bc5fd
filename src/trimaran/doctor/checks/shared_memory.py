"""H008: /dev/shm is large enough for NCCL, which uses it between GPUs without peer access."""

from trimaran.core import GIB, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H008", "/dev/shm")
MIN_FREE_BYTES = 1 * GIB


def check(facts: Facts) -> CheckResult:
    """Report whether /dev/shm is large enough. Trimaran's own loaders and checkpoints do not use it."""
    size, free = facts.host.shm, facts.host.shm_free
    if size is None or free is None:
        return INFO.skipped("there is no /dev/shm here")
    if len(facts.gpus) > 1 and free < MIN_FREE_BYTES:
        what = f"{show_bytes(free)} free of {show_bytes(size)}, and NCCL needs about {show_bytes(MIN_FREE_BYTES)}"
        fix = ("start the container with --shm-size=16g or --ipc=host; "
               "outside a container: mount -o remount,size=16G /dev/shm")  # fmt: skip
        return INFO.warn(f"{what} for {len(facts.gpus)} GPUs", fix, free=free, size=size)
    return INFO.passed(f"{show_bytes(free)} free of {show_bytes(size)}", free=free, size=size)

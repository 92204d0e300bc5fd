"""/dev/shm: NCCL puts what GPUs of one machine exchange there where they cannot reach each other."""

from trimaran.core import GIB, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H008", "/dev/shm")
ENOUGH = 1 * GIB


def check(facts: Facts) -> CheckResult:
    """Say whether /dev/shm is large enough. Trimaran's own loaders and checkpoints do not use it."""
    size, free = facts.host.shm, facts.host.shm_free
    if size is None or free is None:
        return LOOK.skipped("there is no /dev/shm here")
    if len(facts.gpus) > 1 and free < ENOUGH:
        return LOOK.warn(f"{show_bytes(free)} free of {show_bytes(size)}, and NCCL wants about {show_bytes(ENOUGH)} "
                         f"for {len(facts.gpus)} GPUs", "start the container with --shm-size=16g or --ipc=host; "
                         "outside: mount -o remount,size=16G /dev/shm", free=free, size=size)  # fmt: skip
    return LOOK.passed(f"{show_bytes(free)} free of {show_bytes(size)}", free=free, size=size)

"""H010: free disk space for the run's checkpoints, and a writable run directory."""

from trimaran.core import GIB, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H010", "disk space")
MIN_FREE_BYTES = 10 * GIB  # without a recipe that says how much the run writes
MIN_FREE_INODES = 10_000


def check(facts: Facts) -> CheckResult:
    """Report whether everything the run writes fits on the disk."""
    disk, requirements = facts.disk, facts.requirements
    if disk is None:
        return INFO.skipped("the disk was not checked")
    where, free = str(disk.path), show_bytes(disk.free)
    if disk.write_error:
        return INFO.fail(f"cannot write to {where}: {disk.write_error}", "choose another folder: --run-dir DIR")
    if disk.inodes is not None and disk.inodes < MIN_FREE_INODES:
        return INFO.warn(f"{where} has only {disk.inodes:,} free inodes", "delete small files there")
    if requirements and requirements.disk_bytes > disk.free:
        fix = "free disk space, choose another disk with --run-dir DIR, or --set checkpoint.keep=1"
        need = show_bytes(requirements.disk_bytes)
        return INFO.fail(f"checkpoints and weights need {need}, {where} has {free} free", fix)
    if requirements and requirements.disk_bytes:
        return INFO.passed(
            f"{free} free at {where}, the run writes {show_bytes(requirements.disk_bytes)}", free=disk.free
        )
    if disk.free < MIN_FREE_BYTES:
        return INFO.warn(
            f"{free} free at {where}", "free disk space, or name a recipe with --recipe for an exact check"
        )
    return INFO.passed(f"{free} free at {where}", free=disk.free)

"""Disk: room for the checkpoints of the run, and a place that can be written to."""

from trimaran.core import GIB, show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H010", "disk space")
LITTLE = 10 * GIB  # free, where no recipe says what is wanted
LEAST_INODES = 10_000


def check(facts: Facts) -> CheckResult:
    """Say whether what the run is going to write fits."""
    disk, work = facts.disk, facts.work
    if disk is None:
        return LOOK.skipped("nobody looked at the disk")
    where, free = str(disk.path), show_bytes(disk.free)
    if disk.trouble:
        return LOOK.fail(f"nothing can be written to {where}: {disk.trouble}", "choose another folder: --run-dir DIR")
    if disk.inodes is not None and disk.inodes < LEAST_INODES:
        return LOOK.warn(f"{where} has room for only {disk.inodes:,} more files (inodes)", "delete small files there")
    if work and work.disk_bytes > disk.free:
        return LOOK.fail(f"checkpoints and weights need {show_bytes(work.disk_bytes)}, {where} has {free} free",
                         "make room, choose another disk with --run-dir DIR, or --set checkpoint.keep=1")  # fmt: skip
    if work and work.disk_bytes:
        return LOOK.passed(f"{free} free at {where}, the run writes {show_bytes(work.disk_bytes)}", free=disk.free)
    if disk.free < LITTLE:
        return LOOK.warn(f"{free} free at {where}", "make room, or name the recipe with --recipe to know better")
    return LOOK.passed(f"{free} free at {where}", free=disk.free)

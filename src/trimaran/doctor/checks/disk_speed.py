"""Disk speed: a checkpoint is written before the next one is due."""

import math

from trimaran.core import show_bytes, show_seconds
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

LOOK = CheckInfo("H011", "disk speed")
SLOW = 50e6  # bytes a second, where no recipe says what is wanted: less than a laptop's disk
WHOLE, BUSY = 1.0, 0.5  # of the time between two checkpoints that a write may take


def check(facts: Facts) -> CheckResult:
    """Say how long the recipe's checkpoint takes to write, beside how often one is due."""
    if facts.disk is None or facts.disk.bandwidth is None:
        return LOOK.skipped("the quick look writes nothing")
    rate, work = facts.disk.bandwidth, facts.work
    said = f"{show_bytes(rate)} a second, synced"
    if work is None or not work.checkpoint_bytes:
        if rate < SLOW:
            return LOOK.warn(f"{said}, at {facts.disk.path}", "put runs on a faster disk: --run-dir DIR", rate=rate)
        return LOOK.passed(said, rate=rate)
    seconds = work.checkpoint_bytes / rate
    said = f"a checkpoint of {show_bytes(work.checkpoint_bytes)} takes {show_seconds(seconds)} at {said}"
    if work.interval and seconds > BUSY * work.interval:
        words = f"{said}, and one is due every {show_seconds(work.interval)}"
        enough = math.ceil(work.every * seconds / (BUSY * work.interval))
        fix = f"save less often: --set checkpoint.every={enough}, or put runs on a faster disk"
        return LOOK.warn(words if seconds < WHOLE * work.interval else f"{words}: saves cannot keep up", fix, rate=rate)
    return LOOK.passed(said, rate=rate, seconds=seconds)

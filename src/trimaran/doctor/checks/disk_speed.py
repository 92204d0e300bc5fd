"""H011: the disk writes a checkpoint before the next one is due."""

import math

from trimaran.core import show_bytes, show_seconds
from trimaran.doctor.checks.result import CheckInfo, CheckResult
from trimaran.doctor.machine_facts import Facts

INFO = CheckInfo("H011", "disk speed")
MIN_BYTES_PER_SECOND = 50e6  # without a recipe: slower than a laptop's disk
# Fractions of the time between two checkpoints that a write takes: beyond the first we warn, at 1.0 saves fall behind.
WARN_FRACTION, SATURATED_FRACTION = 0.5, 1.0


def check(facts: Facts) -> CheckResult:
    """Compare the time to write the recipe's checkpoint with the time between two of them."""
    if facts.disk is None or facts.disk.bandwidth is None:
        return INFO.skipped("--quick writes nothing")
    rate, requirements = facts.disk.bandwidth, facts.requirements
    what = f"{show_bytes(rate)}/s with fsync"
    if requirements is None or not requirements.checkpoint_bytes:
        if rate < MIN_BYTES_PER_SECOND:
            return INFO.warn(f"{what} at {facts.disk.path}", "put runs on a faster disk: --run-dir DIR", rate=rate)
        return INFO.passed(what, rate=rate)
    seconds, interval = requirements.checkpoint_bytes / rate, requirements.interval
    what = f"a checkpoint of {show_bytes(requirements.checkpoint_bytes)} takes {show_seconds(seconds)} at {what}"
    if interval and seconds > WARN_FRACTION * interval:
        what = f"{what}, and one is due every {show_seconds(interval)}"
        if seconds >= SATURATED_FRACTION * interval:
            what = f"{what}: saves cannot keep up"
        every = math.ceil(requirements.every * seconds / (WARN_FRACTION * interval))
        fix = f"save less often: --set checkpoint.every={every}, or put runs on a faster disk"
        return INFO.warn(what, fix, rate=rate)
    return INFO.passed(what, rate=rate, seconds=seconds)

"""F069: a GPU is hot or slowed down."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.measured import number
from trimaran.doctor.told import gpus_of

FEWEST = 3
RECENT = 60  # samples
HOT = 88.0  # degrees
SLOW = 0.85  # of its highest clock
OFTEN = 0.3  # of the samples
# A device that works hard is at its power limit: that alone is no fault.
BAD = ("thermal", "hw_thermal", "sw_thermal", "hw_slowdown", "power_brake", "hw_power_brake")


def gpu_throttled(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each GPU that was too hot, or slowed down by something else than its power limit."""
    for name, samples in gpus_of(evidence):
        recent = samples[-RECENT:]
        if len(recent) < FEWEST:
            continue
        reasons = [reason for each in recent for reason in each.get("throttle") or () if reason in BAD]
        share = sum(any(reason in BAD for reason in each.get("throttle") or ()) for each in recent) / len(recent)
        heat = median(number(each, "temperature") or 0.0 for each in recent)
        if share < OFTEN and heat < HOT:
            continue
        clock = median(_clock(each) for each in recent)
        why = max(set(reasons), key=reasons.count) if reasons else "heat"
        yield Finding(
            code="F069",
            severity="warning",
            verdict=f"{name} is at {heat:.0f} C and {clock:.0%} of its clock, slowed down in {share:.0%} of the "
            f"samples ({why.replace('_', ' ')})",
            culprit=name,
            evidence={"temperature": heat, "clock": clock, "share": share, "reasons": sorted(set(reasons))},
            fix="look at its fans, the air in front of it and its power supply; until then leave that machine out",
            expected_effect=f"all ranks wait for it: up to {1 - clock:.0%} shorter steps" if clock < SLOW else "",
            gain=round(1 - clock, 4) if clock < SLOW else None,
            confidence=0.9,
        )


def _clock(gpu: Line) -> float:
    now, most = number(gpu, "sm_clock"), number(gpu, "sm_clock_max")
    return now / most if now and most else 1.0

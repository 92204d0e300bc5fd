"""F069: a GPU is hot, slowed down, or held at a low clock."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import gpus_of, smi_name
from trimaran.doctor.step_breakdown import number
from trimaran.telemetry.nvml import FAULTS

FEWEST = 3
RECENT = 60  # samples
HOT = 88.0  # degrees
SLOW = 0.85  # of its highest clock
OFTEN = 0.3  # of the samples
BUSY = 0.7  # of the time between two samples, in which some kernel ran
# Of its highest clock, in the median of busy samples. A healthy H200 at its 700 W is at 0.83, and at moments at 0.65.
HELD = 0.7
AT_LIMIT = 0.8  # of the power limit: from here on it is power that sets the clock
LOWERED = 0.95  # of its default: a limit below that was set by a person


def gpu_throttled(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each GPU that was too hot, slowed down by a fault, or held below its clock by a setting.

    A device that works hard is at its power limit, and its clock goes down for that: that alone is no fault.
    """
    for name, samples in gpus_of(evidence):
        yield from _slowed(name, samples[-RECENT:]) or _held(name, samples)


def _slowed(name: str, recent: Sequence[Line]) -> list[Finding]:
    """Return the finding about heat or a fault that the device itself tells of, if there is one."""
    if len(recent) < FEWEST:
        return []
    reasons = [reason for each in recent for reason in each.get("throttle") or () if reason in FAULTS]
    share = sum(any(reason in FAULTS for reason in each.get("throttle") or ()) for each in recent) / len(recent)
    heat = median(number(each, "temperature") or 0.0 for each in recent)
    if share < OFTEN and heat < HOT:
        return []
    clock = median(map(_clock, recent))
    why = max(set(reasons), key=reasons.count) if reasons else "heat"
    return [
        Finding(
            code="F069",
            severity="warning",
            verdict=f"{name} is at {heat:.0f} C and {clock:.0%} of its clock, slowed down in {share:.0%} of the "
            f"samples ({why.replace('_', ' ')})",
            culprit=name,
            evidence={"temperature": heat, "clock": clock, "share": share, "reasons": sorted(set(reasons))},
            fix="look at its fans, the air in front of it and its power supply; until then leave that machine out",
            confidence=0.9,
            **_effect(clock),
        )
    ]


def _held(name: str, samples: Sequence[Line]) -> list[Finding]:
    """Return the finding about a low clock at work that a setting explains, if there is one."""
    busy = [each for each in samples if (number(each, "utilisation") or 0.0) >= BUSY][-RECENT:]
    clock = median(map(_clock, busy)) if len(busy) >= FEWEST else 1.0
    if clock >= HELD:
        return []
    last = busy[-1]
    limit, usual = number(last, "power_limit") or 0.0, number(last, "power_limit_default") or 0.0
    power = median(number(each, "power") or 0.0 for each in busy)
    is_lowered = limit < LOWERED * usual
    if power >= AT_LIMIT * limit and not is_lowered:
        return []
    tool = f"nvidia-smi -i {smi_name(last)}"
    why, undo = f"held there by a setting: it draws {power:.0f} W of {limit:.0f} W", f"`{tool} -rgc` and `{tool} -rac`"
    if is_lowered:
        why, undo = f"and its power limit is {limit:.0f} W, by default {usual:.0f} W", f"`{tool} -pl {usual:.0f}`"
    return [
        Finding(
            code="F069",
            severity="warning",
            verdict=f"{name} is busy at {clock:.0%} of its clock, {why}",
            culprit=name,
            evidence={"clock": clock, "power": power, "power_limit": limit, "power_limit_default": usual or None},
            fix=f"undo the setting, as root on that machine: {undo}",
            confidence=0.8,
            **_effect(clock),
        )
    ]


def _effect(clock: float) -> dict[str, Any]:
    """Return what a device at its full clock would bring, as fields of a finding."""
    if clock >= SLOW:
        return {}
    return {
        "expected_effect": f"all ranks wait for it: up to {1 - clock:.0%} shorter steps",
        "gain": round(1 - clock, 4),
    }


def _clock(gpu: Line) -> float:
    now, most = number(gpu, "sm_clock"), number(gpu, "sm_clock_max")
    return now / most if now and most else 1.0

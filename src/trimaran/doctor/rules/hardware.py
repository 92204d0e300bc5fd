"""Rules about GPUs and hosts: throttled clocks, memory errors and swapping."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import node_name, samples_by_node, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_number, get_numbers
from trimaran.machine import HARDWARE_THROTTLE_REASONS

MIN_SAMPLES = 3
MAX_SAMPLES = 60  # the most recent ones
HOT_CELSIUS = 88.0
SLOW_CLOCK_FRACTION = 0.85  # of the highest clock, below which the finding names a gain
MIN_THROTTLED_FRACTION = 0.3  # of the samples
MIN_BUSY_UTILISATION = 0.7
# Of the highest clock, in the median of busy samples. A healthy H200 at 700 W is at 0.83, and at moments at 0.65.
MIN_CLOCK_FRACTION = 0.7
AT_POWER_LIMIT_FRACTION = 0.8  # of the power limit: from here on power sets the clock
MIN_FRACTION_OF_DEFAULT_LIMIT = 0.95  # a power limit below that was set by a user


def gpu_throttled(evidence: Evidence) -> Iterator[Finding]:
    """Yield F069 for each GPU that was too hot, throttled by a fault, or limited by a setting."""
    # A busy GPU at its power limit lowers its clock; that alone is no fault.
    for name, samples in _samples_by_gpu(evidence):
        if found := _throttled(name, samples[-MAX_SAMPLES:]) or _limited(name, samples):
            yield found


def _throttled(name: str, recent: Sequence[Line]) -> Finding | None:
    if len(recent) < MIN_SAMPLES:
        return None
    by_sample = [[each for each in gpu.get("throttle") or () if each in HARDWARE_THROTTLE_REASONS] for gpu in recent]
    reasons = [reason for each in by_sample for reason in each]
    throttled = sum(map(bool, by_sample)) / len(recent)
    celsius = median(get_number(each, "temperature") or 0.0 for each in recent)
    if throttled < MIN_THROTTLED_FRACTION and celsius < HOT_CELSIUS:
        return None
    clock = median(map(_clock, recent))
    why = max(set(reasons), key=reasons.count) if reasons else "heat"
    return _slow_gpu(
        name,
        clock,
        verdict=f"{name} is at {celsius:.0f} C and {clock:.0%} of its highest clock, throttled in "
        f"{throttled:.0%} of the samples ({why.replace('_', ' ')})",
        evidence={"temperature": celsius, "clock": clock, "share": throttled, "reasons": sorted(set(reasons))},
        fix="check its fans, the airflow and its power supply; until then leave that node out",
        confidence=0.9,
    )


def _limited(name: str, samples: Sequence[Line]) -> Finding | None:
    busy = [each for each in samples if (get_number(each, "utilisation") or 0.0) >= MIN_BUSY_UTILISATION][-MAX_SAMPLES:]
    clock = median(map(_clock, busy)) if len(busy) >= MIN_SAMPLES else 1.0
    if clock >= MIN_CLOCK_FRACTION:
        return None
    last = busy[-1]
    limit, default = get_number(last, "power_limit") or 0.0, get_number(last, "power_limit_default") or 0.0
    power = median(get_number(each, "power") or 0.0 for each in busy)
    is_lowered = limit < MIN_FRACTION_OF_DEFAULT_LIMIT * default
    if power >= AT_POWER_LIMIT_FRACTION * limit and not is_lowered:
        return None
    tool = f"nvidia-smi -i {_nvidia_smi_id(last)}"
    why = f"limited by a clock setting: it draws {power:.0f} W of {limit:.0f} W"
    reset = f"`{tool} -rgc` and `{tool} -rac`"
    if is_lowered:
        why = f"because its power limit is {limit:.0f} W (default {default:.0f} W)"
        reset = f"`{tool} -pl {default:.0f}`"
    return _slow_gpu(
        name,
        clock,
        verdict=f"{name} runs at {clock:.0%} of its highest clock under load, {why}",
        evidence={"clock": clock, "power": power, "power_limit": limit, "power_limit_default": default or None},
        fix=f"undo the setting, as root on that node: {reset}",
        confidence=0.8,
    )


def _slow_gpu(
    name: str, clock: float, *, verdict: str, evidence: dict[str, Any], fix: str, confidence: float
) -> Finding:
    is_slow = clock < SLOW_CLOCK_FRACTION
    return Finding(
        code="F069",
        severity="warning",
        verdict=verdict,
        culprit=name,
        evidence=evidence,
        fix=fix,
        expected_effect=f"steps up to {1 - clock:.0%} shorter, because all ranks wait for this GPU" if is_slow else "",
        gain=round(1 - clock, 4) if is_slow else None,
        confidence=confidence,
    )


def _clock(gpu: Line) -> float:
    clock, highest = get_number(gpu, "sm_clock"), get_number(gpu, "sm_clock_max")
    return clock / highest if clock and highest else 1.0


def _samples_by_gpu(evidence: Evidence) -> Iterator[tuple[str, list[Line]]]:
    samples: dict[str, list[Line]] = {}
    for sample in evidence.samples:
        for gpu in sample.get("gpus") or ():
            name = f"GPU {gpu.get('index')} of {node_name(sample)}"
            samples.setdefault(name, []).append(gpu)
    yield from samples.items()


def _nvidia_smi_id(gpu: Line) -> str:
    """Return the UUID for `nvidia-smi -i`, because CUDA may number GPUs in another order; else the index."""
    return str(gpu.get("uuid") or gpu.get("index"))


def gpu_memory_errors(evidence: Evidence) -> Iterator[Finding]:
    """Yield F070 for each GPU that counted uncorrected ECC errors."""
    for name, samples in _samples_by_gpu(evidence):
        counts = get_numbers(samples, "ecc_uncorrected")
        if not counts or not counts[-1]:
            continue
        new = counts[-1] - counts[0]
        yield Finding(
            code="F070",
            severity="fault" if new else "warning",
            verdict=f"{name} had {counts[-1]:.0f} uncorrected memory errors, {new:.0f} of them during this run",
            culprit=name,
            evidence={"errors": counts[-1], "new": new, "uuid": samples[-1].get("uuid")},
            fix=f"take the node out and reset the GPU (`nvidia-smi -r -i {_nvidia_smi_id(samples[-1])}`); if errors "
            "return, have it replaced",
            confidence=0.95,
        )


MIN_SWAPPED_BYTES = 256 << 20
MIN_SWAPPED_FRACTION = 0.02  # of the node's memory
MIN_USED_FRACTION = 0.85  # of the node's memory: below that, swapped pages are old and unused


def swap(evidence: Evidence) -> Iterator[Finding]:
    """Yield F071 for each node that swaps while its memory is full."""
    for name, samples in samples_by_node(evidence):
        rams, useds = get_numbers(samples, "ram"), get_numbers(samples, "ram_used")
        if not rams or not useds or max(useds) < MIN_USED_FRACTION * rams[-1]:
            continue
        # The bytes swapped out and in, or else the growth of swap: old pages that stay there cost nothing.
        held = get_numbers(samples, "swap_used")
        grown = held[-1] - min(held) if held else 0.0
        pairs = [(get_number(after, "time"), get_number(before, "time"), get_number(after, "swap_read"),
                  get_number(after, "swap_written")) for before, after in pairwise(samples)]  # fmt: skip
        counted = sum((now - then) * (came + went) for now, then, came, went in pairs
                      if now is not None and then is not None and came is not None and went is not None)  # fmt: skip
        ram, used, swapped = rams[-1], max(useds), max(grown, counted)
        if swapped < max(MIN_SWAPPED_BYTES, MIN_SWAPPED_FRACTION * ram):
            continue
        patch: Patch = {"checkpoint.memory": 0}  # what frees host memory at the least cost, then fewer loaders
        if evidence.recipe.checkpoint.memory == 0:
            patch = {"data.workers": 1} if evidence.recipe.data.workers not in (0, 1) else {}
        patch = valid_patch(evidence.recipe, patch)
        yield Finding(
            code="F071",
            severity="warning",
            verdict=f"{name} uses {show_bytes(used)} of {show_bytes(ram)} memory and swaps to disk: "
            f"{show_bytes(swapped)} since the run began",
            culprit=name,
            evidence={"moved": swapped, "swap_used": (get_numbers(samples, "swap_used") or [0])[-1], "ram_used": used,
                      "ram": ram},
            patch=patch,
            fix="" if patch else "use a node with more memory, or fewer ranks on this one",
            expected_effect="less host memory is used, and no process waits for swapping" if patch else "",
            confidence=0.85,
        )  # fmt: skip

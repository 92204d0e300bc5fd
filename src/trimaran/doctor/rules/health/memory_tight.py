"""F061: memory is almost full, and a larger batch may run out."""

from collections.abc import Iterator
from typing import NamedTuple

from trimaran.core import Finding, show_bytes
from trimaran.doctor.device_memory import held_by_others
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incidents_of, samples_by_node
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.step_breakdown import get_number

MAX_DEVICE_FRACTION = 0.95  # of a device's memory, at the peak of allocated tensors
MAX_HOST_FRACTION = 0.97  # of a node's memory


class MemoryUse(NamedTuple):
    """Memory in use of a device or host; `others` is the part that other processes hold."""

    where: str
    used: float
    total: float
    others: float = 0.0


def memory_tight(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a device or a host is almost full. If memory ran out, it is F062."""
    if incidents_of(evidence, "oom"):
        return
    use = max(_uses(evidence), key=lambda each: each.used / each.total, default=None)
    if use is None:
        return
    memory_fix = cheapest_memory_fix(evidence, ran_out=True)
    others = f", and other processes hold {show_bytes(use.others)} of that" if use.others else ""
    fix = "" if memory_fix else "use more or larger devices, shorter sequences or a smaller model"
    yield Finding(
        code="F061",
        severity="warning",
        verdict=f"{use.where} has {show_bytes(use.used)} of {show_bytes(use.total)} in use, "
        f"{use.used / use.total:.0%}{others}",
        culprit=use.where,
        evidence={"used": use.used, "total": use.total, "others": use.others},
        patch=memory_fix.patch if memory_fix else {},
        fix="find the other processes on the device with `nvidia-smi`, and stop them" if use.others else fix,
        expected_effect=memory_fix.effect if memory_fix else "",
        gain=memory_fix.gain if memory_fix else None,
        confidence=0.9,
    )


def _uses(evidence: Evidence) -> Iterator[MemoryUse]:
    """Yield the devices and hosts that are too full."""
    for step in evidence.steps[-1:]:
        on_device = get_number(step, "memory", "reserved") is not None  # only the CUDA allocator reports it
        total, peak = get_number(step, "memory", "total"), get_number(step, "peak_bytes")
        ranks = next((each for each in reversed(evidence.steps) if "ranks" in each), step)
        at = get_number(ranks, "ranks", "peak_bytes", "at") or 0.0
        most = max(peak or 0.0, get_number(ranks, "ranks", "peak_bytes", "max") or 0.0)
        if on_device and total and most > MAX_DEVICE_FRACTION * total:
            yield MemoryUse(f"the device of rank {at:.0f}", most, total)
        others = held_by_others(evidence)
        if on_device and total and peak and others and peak + others > MAX_DEVICE_FRACTION * total:
            yield MemoryUse("the device of rank 0", min(peak + others, total), total, others)
    for name, samples in samples_by_node(evidence):
        used, total = get_number(samples[-1], "ram_used"), get_number(samples[-1], "ram")
        if used and total and used > MAX_HOST_FRACTION * total:
            yield MemoryUse(f"the host {name}", used, total)

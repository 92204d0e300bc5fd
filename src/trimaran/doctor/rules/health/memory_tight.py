"""F061: memory is so full that the next larger batch may end the run."""

from collections.abc import Iterator
from typing import NamedTuple

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incidents_of, nodes_of
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.step_breakdown import number

FULL = 0.95  # of a device that tensors hold at their peak
HOST_FULL = 0.97  # of a machine's memory in use
OWN = 4 << 30  # bytes that a rank may have on its device beside its allocator: a context, libraries, buffers of NCCL
SEEN = 3  # samples, the lowest of which counts: what is gone again is nobody's


class Use(NamedTuple):
    """What is in use of a memory, and what of that is held by others than the run."""

    where: str
    used: float
    total: float
    others: float = 0.0


def memory_tight(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a device or a host is all but full. Memory that has run out is F062."""
    if incidents_of(evidence, "oom"):
        return
    use = max(_uses(evidence), key=lambda each: each.used / each.total, default=None)
    if use is None:
        return
    way = cheapest_memory_fix(evidence, ran_out=True)
    beside = f", and {show_bytes(use.others)} of that are not this run's" if use.others else ""
    fix = "" if way else "use more or larger devices, shorter sequences or a smaller model"
    yield Finding(
        code="F061",
        severity="warning",
        verdict=f"{use.where} has {show_bytes(use.used)} of {show_bytes(use.total)} in use, "
        f"{use.used / use.total:.0%}{beside}",
        culprit=use.where,
        evidence={"used": use.used, "total": use.total, "others": use.others},
        patch=way.patch if way else {},
        fix="see with `nvidia-smi` who else is on the device, and end that" if use.others else fix,
        expected_effect=way.effect if way else "",
        gain=way.gain if way else None,
        confidence=0.9,
    )


def _uses(evidence: Evidence) -> Iterator[Use]:
    """Yield the memories that are too full."""
    for step in evidence.steps[-1:]:
        on_device = number(step, "memory", "reserved") is not None  # what only a GPU's allocator tells
        total, peak = number(step, "memory", "total"), number(step, "peak_bytes")
        at = number(step, "ranks", "peak_bytes", "at") or 0.0
        most = max(peak or 0.0, number(step, "ranks", "peak_bytes", "max") or 0.0)
        if on_device and total and most > FULL * total:
            yield Use(f"the device of rank {at:.0f}", most, total)
        others = _others(evidence, step)
        if on_device and total and peak and others and peak + others > FULL * total:
            yield Use("the device of rank 0", min(peak + others, total), total, others)
    for name, samples in nodes_of(evidence):
        used, total = number(samples[-1], "ram_used"), number(samples[-1], "ram")
        if used and total and used > HOST_FULL * total:
            yield Use(f"the host {name}", used, total)


def _others(evidence: Evidence, last: Line) -> float:
    """Return the bytes that others hold on the device of rank 0, by samples that were taken while it trained."""
    begin, end = number(evidence.steps[0], "time") or 0.0, number(last, "time") or 0.0
    during = [
        each for each in evidence.samples if each.get("node") == 0 and begin <= (number(each, "time") or 0) <= end
    ]
    first = [gpu for each in during for gpu in each.get("gpus") or () if gpu.get("index") == 0]
    held = [used for each in first[-SEEN:] if (used := number(each, "memory_used"))]
    return max(0.0, min(held, default=0.0) - (number(last, "memory", "reserved") or 0.0) - OWN)

"""F061: memory is so full that the next larger batch may end the run."""

from collections.abc import Iterator

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.leaner import cheapest_way_out
from trimaran.doctor.measured import number
from trimaran.doctor.told import incidents_of, nodes_of

FULL = 0.95  # of a device that tensors hold at their peak
HOST_FULL = 0.97  # of a machine's memory in use


def memory_tight(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a device or a host is all but full. Memory that has run out is F062."""
    if incidents_of(evidence, "oom"):
        return
    where, used, total = max(_uses(evidence), key=lambda each: each[1] / each[2], default=("", 0.0, 1.0))
    if not used:
        return
    way = cheapest_way_out(evidence, ran_out=True)
    yield Finding(
        code="F061",
        severity="warning",
        verdict=f"{where} has {show_bytes(used)} of {show_bytes(total)} in use, {used / total:.0%}",
        culprit=where,
        evidence={"used": used, "total": total},
        patch=way.patch if way else {},
        fix="" if way else "use more or larger devices, shorter sequences or a smaller model",
        expected_effect=way.effect if way else "",
        gain=way.gain if way else None,
        confidence=0.9,
    )


def _uses(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    """Yield who is too full, with what is in use and what there is."""
    for step in evidence.steps[-1:]:
        on_device = number(step, "memory", "reserved") is not None  # what only a GPU's allocator tells
        total, peak = number(step, "memory", "total"), number(step, "peak_bytes")
        at = number(step, "ranks", "peak_bytes", "at") or 0.0
        peak = max(peak or 0.0, number(step, "ranks", "peak_bytes", "max") or 0.0)
        if on_device and total and peak > FULL * total:
            yield f"the device of rank {at:.0f}", peak, total
    for name, samples in nodes_of(evidence):
        used, total = number(samples[-1], "ram_used"), number(samples[-1], "ram")
        if used and total and used > HOST_FULL * total:
            yield f"the host {name}", used, total

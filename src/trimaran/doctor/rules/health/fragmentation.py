"""F060: the allocator's memory is in pieces, or it has to beg for more."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.step_breakdown import number

FEWEST = 10
SPLIT = 0.25  # of what is reserved, free and in pieces that are too small
FULL = 0.8  # of the device that is reserved: below that nobody misses the pieces
PER_STEP = 0.02  # retries: each stops the device and frees everything that is cached


def fragmentation(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when much of the reserved memory is free but split, or allocations have to be tried again."""
    steps = [each for each in evidence.steps if isinstance(each.get("memory"), dict)]
    if len(steps) < FEWEST:
        return
    retries = (number(steps[-1], "memory", "retries") or 0.0) - (number(steps[0], "memory", "retries") or 0.0)
    split = median(number(each, "memory", "fragmentation") or 0.0 for each in steps)
    reserved, total = number(steps[-1], "memory", "reserved") or 0.0, number(steps[-1], "memory", "total") or 0.0
    thrashes = retries > PER_STEP * len(steps)
    if not total or not (thrashes or (split > SPLIT and reserved > FULL * total)):
        return
    way = cheapest_memory_fix(evidence, ran_out=thrashes)
    yield Finding(
        code="F060",
        severity="warning",
        verdict=f"{split:.0%} of the {show_bytes(reserved)} that the allocator holds is free but in pieces, and it had "
        f"to give everything back and try again {retries:.0f} times in {len(steps)} steps",
        culprit="allocator of rank 0",
        evidence={"fragmentation": split, "retries": retries, "reserved": reserved, "total": total},
        patch=way.patch if way else {},
        fix="start it with PYTORCH_ALLOC_CONF=expandable_segments:True: segments grow in place, and leave no pieces",
        expected_effect=way.effect if way else "pieces join up again",
        gain=way.gain if way else None,
        confidence=0.8,
    )

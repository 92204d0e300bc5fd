"""F060: GPU memory is fragmented, or allocation retries slow the run down."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, show_bytes
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.memory_fix import cheapest_memory_fix
from trimaran.doctor.step_breakdown import get_number
from trimaran.planner.memory_ladder import Patch, uses_expandable_segments

FIRST_RUNG: Patch = {"faults.expandable_segments": True}
FIRST_EFFECT = "no fragmentation: segments of the allocator grow in place, which costs nothing"
MIN_STEPS = 10
MIN_FRAGMENTED_FRACTION = 0.25  # of reserved memory that is free but split
MIN_RESERVED_FRACTION = 0.8  # of the device: below that fragmentation does no harm
MAX_RETRIES_PER_STEP = 0.02  # each retry synchronises the device and frees all cached blocks
RETRY_SECONDS, MAX_RETRY_GAIN = 0.1, 0.2  # what a retry and its new reservations cost, and the most of a step; assumed


def fragmentation(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if much of the reserved memory is free but split, or allocations are retried often."""
    steps = [each for each in evidence.steps if isinstance(each.get("memory"), dict)]
    if len(steps) < MIN_STEPS:
        return
    retries = (get_number(steps[-1], "memory", "retries") or 0.0) - (get_number(steps[0], "memory", "retries") or 0.0)
    fragmented = median(get_number(each, "memory", "fragmentation") or 0.0 for each in steps)
    reserved, total = (
        get_number(steps[-1], "memory", "reserved") or 0.0,
        get_number(steps[-1], "memory", "total") or 0.0,
    )
    thrashes = retries > MAX_RETRIES_PER_STEP * len(steps)
    is_split = fragmented > MIN_FRAGMENTED_FRACTION and reserved > MIN_RESERVED_FRACTION * total
    if not total or not (thrashes or is_split):
        return
    if not _expands_segments(evidence):
        seconds = median(each["step_seconds"] for each in steps)
        gain = min(MAX_RETRY_GAIN, RETRY_SECONDS * retries / len(steps) / seconds) if thrashes else 0.0
        patch, effect = FIRST_RUNG, FIRST_EFFECT
    else:
        memory_fix = cheapest_memory_fix(evidence, ran_out=thrashes)
        patch, effect = (memory_fix.patch, memory_fix.effect) if memory_fix else ({}, "no fragmentation")
        gain = memory_fix.gain if memory_fix else None
    yield Finding(
        code="F060",
        severity="warning",
        verdict=f"{fragmented:.0%} of the {show_bytes(reserved)} that the allocator reserves is free but fragmented, "
        f"with {retries:.0f} allocation retries in {len(steps)} steps",
        culprit="allocator of rank 0",
        evidence={"fragmentation": fragmented, "retries": retries, "reserved": reserved, "total": total},
        patch=patch,
        fix="" if patch else "use smaller micro-batches, or a GPU with more memory",
        expected_effect=effect,
        gain=gain,
        confidence=0.8,
    )


def _expands_segments(evidence: Evidence) -> bool:
    """Return whether the ranks have expandable segments. A user's PYTORCH_ALLOC_CONF is not in the run's files."""
    wanted = evidence.recipe.faults.expandable_segments
    return uses_expandable_segments(evidence.plan) if wanted == "auto" else wanted

"""How much of a device's memory a run can use: what other processes hold is not its own."""

from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import get_number

CONTEXT_BYTES = 4 << 30  # of a rank outside its allocator: CUDA context, libraries, NCCL buffers
OTHERS_SAMPLES = 3  # the lowest of these counts, so that memory freed meanwhile does not


def held_by_others(evidence: Evidence) -> float:
    """Return the bytes that other processes hold on rank 0's device, from samples taken while it trained."""
    begin, last = get_number(evidence.steps[0], "time") or 0.0, evidence.steps[-1]
    end = get_number(last, "time") or 0.0
    during = [
        each for each in evidence.samples if each.get("node") == 0 and begin <= (get_number(each, "time") or 0) <= end
    ]
    first = [gpu for each in during for gpu in each.get("gpus") or () if gpu.get("index") == 0]
    held = [used for each in first[-OTHERS_SAMPLES:] if (used := get_number(each, "memory_used"))]
    return max(0.0, min(held, default=0.0) - (get_number(last, "memory", "reserved") or 0.0) - CONTEXT_BYTES)


def usable_bytes(evidence: Evidence) -> float | None:
    """Return the memory of rank 0's device without what other processes hold; None if the metrics do not say."""
    totals = [total for each in evidence.steps if (total := get_number(each, "memory", "total"))]
    if not totals:
        return None
    return totals[-1] - held_by_others(evidence)

"""F010: the gradient bucket size is wrong."""

import math
from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.core.plan import data_axis
from trimaran.cost.collective import ring_of
from trimaran.cost.comm_overlap import exposed_reduction
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import plural
from trimaran.doctor.predicted_gain import forecast, with_measured_links
from trimaran.doctor.step_breakdown import get_number, phase_seconds, steady_steps, step_breakdown
from trimaran.planner.comm_choices import BUCKET_SIZES_MB, MEBIBYTE

WIDTHS = {"none": 4, "fp16": 2, "bf16": 2}  # bytes that are sent for each value; other kinds are not plain all-reduces
MIN_GAIN_FRACTION = 0.05  # of a step
MAX_BUSY_CORES_FRACTION = 0.8  # of a node's cores: below that some are idle
MIN_EXPOSED_RATIO = 2.0  # of exposed communication now over that with the best size


def bucket(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if another bucket size would expose clearly less of the gradient all-reduce.

    Each bucket costs the latency of a ring, so many small ones add up. The first bucket is sent when its part of
    backward is done, and the last one is fully exposed, so large ones overlap little. Gloo overlaps only if cores are
    idle; then the ring is as slow as it was measured.
    """
    measured, question, plan = step_breakdown(evidence), evidence.planner_inputs(), evidence.plan
    is_ddp = plan.sharding == "none" and plan.mesh.data > 1 and not plan.comm.local.is_on
    is_ddp = is_ddp and plan.comm.overlap and plan.engine_traits.uses_fsdp
    if measured is None or question is None or not is_ddp or plan.comm.compression not in WIDTHS:
        return
    mesh, is_cpu = plan.mesh, question.cluster.device.traits.shares_cores
    if is_cpu and _has_idle_cores(evidence):
        question, backward = with_measured_links(question, plan, measured), _backward(evidence)
    else:
        backward = 0.0 if is_cpu else forecast(question, plan).time["backward"] / plan.grad_accum
    ring = ring_of(question.cluster.levels, mesh.data, mesh.tp)
    num_bytes = WIDTHS[str(plan.comm.compression)] * question.job.outline.trained_parameters / (mesh.tp * mesh.pp)
    sizes = {*BUCKET_SIZES_MB, plan.comm.bucket_mb}
    exposed = {size: exposed_reduction(num_bytes, size * MEBIBYTE, ring, backward) for size in sizes}
    best = min(exposed, key=lambda size: (exposed[size], abs(size - 25)))
    now, then = exposed[plan.comm.bucket_mb], exposed[best]
    # No more can be saved than the communication that was measured, of the data ranks alone where it is known.
    waited = min(measured.comm, measured.axes.get(data_axis(plan), measured.comm))
    saved = min(now - then, waited * (1 - then / now)) if now else 0.0
    if saved < MIN_GAIN_FRACTION * measured.step or now < MIN_EXPOSED_RATIO * then:
        return
    small = plan.comm.bucket_mb < best
    count = math.ceil(num_bytes / (plan.comm.bucket_mb * MEBIBYTE))
    yield Finding(
        code="F010",
        severity="note",
        verdict=f"gradients are reduced in {plural(count, 'bucket')} of {plan.comm.bucket_mb} MiB, which is too "
        + ("small: each bucket costs a latency" if small else "large: the last bucket does not overlap with backward"),
        culprit=f"plan.comm.bucket_mb={plan.comm.bucket_mb}",
        evidence={
            "pieces": count,
            "gradient_bytes": num_bytes,
            "comm_seconds": waited,
            "exposed_now": now,
            "exposed_then": then,
        },
        patch={"plan.comm.bucket_mb": best},
        expected_effect=f"steps {saved / measured.step:.0%} shorter",
        gain=saved / measured.step,
        confidence=0.6,
    )


def _has_idle_cores(evidence: Evidence) -> bool:
    """Whether the samples show idle cores for gloo's threads; False without samples."""
    busy = [used for each in evidence.samples if (used := get_number(each, "cpu")) is not None]
    return bool(busy) and median(busy) < MAX_BUSY_CORES_FRACTION


def _backward(evidence: Evidence) -> float:
    """Return how long backward of the last micro-batch takes, which can overlap with the all-reduce."""
    return median(phase_seconds(each, "backward") for each in steady_steps(evidence)) / evidence.plan.grad_accum

"""F010: gradients travel in pieces of the wrong size."""

import math
from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.cost.collective import Ring, all_reduce_seconds, ring_of
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import fitted, forecast
from trimaran.doctor.step_breakdown import measure, number, phase, settled

SIZES = (1, 2, 5, 10, 25, 50, 100, 200, 400)
MEBIBYTE = 2**20
WORTH = 0.05  # of a step
IDLE = 0.8  # of a machine's cores in use at most: then some are idle
FEWER = 2.0  # times: a size must be this far from the best one before anybody changes it


def bucket(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when another size of the pieces would expose clearly less of the reduction.

    Each piece costs the latency of a ring, so small ones are many latencies. The first piece leaves when its part of
    backward is done, and the last travels alone, so large ones hide little. Gloo hides something only where cores are
    idle: there the ring is taken to be as slow as it was measured to be.
    """
    measured, question, plan = measure(evidence), evidence.ask(), evidence.plan
    whole = plan.sharding == "none" and plan.mesh.data > 1 and plan.comm.local_steps == 1 and plan.engine == "torch"
    if measured is None or question is None or not whole or plan.comm.compression in ("powersgd", "topk"):
        return
    mesh, is_cpu = plan.mesh, question.cluster.device.kind == "cpu"
    if is_cpu and _has_idle_cores(evidence):
        question, backward = fitted(question, plan, measured), _backward(evidence)
    else:
        backward = 0.0 if is_cpu else forecast(question, plan).time["backward"] / plan.grad_accum
    ring = ring_of(question.cluster.levels, mesh.data, mesh.tp)
    width = 4 if plan.comm.compression == "none" else 2
    num_bytes = width * question.job.outline.trained_parameters / (mesh.tp * mesh.pp)
    exposed = {size: _exposed(num_bytes, size * MEBIBYTE, ring, backward) for size in {*SIZES, plan.comm.bucket_mb}}
    best = min(exposed, key=lambda size: (exposed[size], abs(size - 25)))
    now, then = exposed[plan.comm.bucket_mb], exposed[best]
    # What was measured is what can be saved, whatever the model says.
    saved = min(now - then, measured.comm * (1 - then / now)) if now else 0.0
    if saved < WORTH * measured.step or now < FEWER * then:
        return
    small = plan.comm.bucket_mb < best
    count = math.ceil(num_bytes / (plan.comm.bucket_mb * MEBIBYTE))
    yield Finding(
        code="F010",
        severity="note",
        verdict=f"gradients travel in {count} pieces of {plan.comm.bucket_mb} MiB, which is too "
        + ("small: each piece costs a latency" if small else "large: the last piece hides behind nothing"),
        culprit=f"plan.comm.bucket_mb={plan.comm.bucket_mb}",
        evidence={
            "pieces": count,
            "gradient_bytes": num_bytes,
            "comm_seconds": measured.comm,
            "exposed_now": now,
            "exposed_then": then,
        },
        patch={"plan.comm.bucket_mb": best},
        expected_effect=f"steps {saved / measured.step:.0%} shorter",
        gain=saved / measured.step,
        confidence=0.6,
    )


def _has_idle_cores(evidence: Evidence) -> bool:
    """Whether gloo's threads have cores to themselves, by the samples of every node; not, where nobody looked."""
    busy = [used for each in evidence.samples if (used := number(each, "cpu")) is not None]
    return bool(busy) and median(busy) < IDLE


def _backward(evidence: Evidence) -> float:
    """Return how long the last micro-batch's backward takes, behind which gradients can travel."""
    return median(phase(each, "backward") for each in settled(evidence)) / evidence.plan.grad_accum


def _exposed(num_bytes: float, size: float, ring: Ring, backward: float) -> float:
    """Return how long the reduction goes on after backward has ended."""
    size = min(size, num_bytes)
    count = math.ceil(num_bytes / size)
    one = all_reduce_seconds(size, ring)
    end = max(backward * size / num_bytes + count * one, backward + one)
    return end - backward

"""F004: the device moves bytes where it should multiply."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from trimaran.core import Finding
from trimaran.cost import predict
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_of, larger_micro_batches
from trimaran.doctor.step_breakdown import measure

SHARE = 0.25  # of computing that is spent on moving bytes
AGREES = (0.8, 1.3)  # times what the model says: elsewhere the model does not know this run


def memory_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when most of the computing is reading and writing memory, and another setting moves less."""
    measured, question = measure(evidence), evidence.ask()
    if measured is None or question is None or question.cluster.device.kind == "cpu":
        return
    cluster = question.cluster
    at_once = replace(cluster, device=replace(cluster.device, reached={**cluster.device.reached, "memory": inf}))
    now, free = (predict(question.job, each, evidence.plan).time for each in (cluster, at_once))
    was, will = (time["forward"] + time["backward"] + time["optimizer"] for time in (now, free))
    share, agrees = 1 - will / was, measured.compute / was
    if share < SHARE or not AGREES[0] <= agrees <= AGREES[1]:
        return
    remedy = best_of(evidence, measured, _candidates(evidence))
    if remedy is None:
        return
    yield Finding(
        code="F004",
        severity="note",
        verdict=f"about {share:.0%} of the computing waits for memory: {cluster.device.name} moves bytes more than it "
        "multiplies",
        culprit="memory bandwidth",
        evidence={
            "compute_seconds": measured.compute,
            "predicted_seconds": was,
            "predicted_without_memory": will,
            "memory_gb_per_second": cluster.device.stream_bandwidth / 1e9,
        },
        patch=remedy.patch,
        expected_effect=remedy.effect,
        gain=remedy.gain,
        confidence=0.7,
    )


def _candidates(evidence: Evidence) -> Iterator[Patch]:
    """Yield what moves fewer bytes for the same arithmetic."""
    plan = evidence.plan
    yield from larger_micro_batches(plan)
    if not plan.compile:
        yield {"plan.compile": True}
    if plan.loss == "logits":
        yield {"plan.loss": "fused"}
    if plan.precision == "fp32":
        yield {"plan.precision": "bf16"}

"""F004: compute is memory-bound."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from trimaran.core import Finding
from trimaran.cost import predict
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import Patch, best_patch
from trimaran.doctor.step_breakdown import step_breakdown
from trimaran.planner.neighbours import larger_micro_batches

MIN_MEMORY_FRACTION = 0.25  # of compute time that waits for memory
MIN_PREDICTION_RATIO, MAX_PREDICTION_RATIO = (
    0.8,
    1.3,
)  # of measured over predicted compute; else the model is wrong here


def memory_bound(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if much of compute waits for memory bandwidth, and another setting needs fewer bytes."""
    measured, question = step_breakdown(evidence), evidence.planner_inputs()
    if measured is None or question is None or not question.cluster.device.traits.has_data_sheet:
        return
    cluster = question.cluster
    infinite = replace(cluster, device=replace(cluster.device, reached={**cluster.device.reached, "memory": inf}))
    times = (predict(question.job, each, evidence.plan).time for each in (cluster, infinite))
    now, without_memory = (time["forward"] + time["backward"] + time["optimizer"] for time in times)
    fraction, ratio = 1 - without_memory / now, measured.compute / now
    if fraction < MIN_MEMORY_FRACTION or not MIN_PREDICTION_RATIO <= ratio <= MAX_PREDICTION_RATIO:
        return
    best = best_patch(evidence, measured, _candidates(evidence))
    if best is None:
        return
    yield Finding(
        code="F004",
        severity="note",
        verdict=f"about {fraction:.0%} of compute on {cluster.device.name} waits for memory bandwidth",
        culprit="memory bandwidth",
        evidence={
            "compute_seconds": measured.compute,
            "predicted_seconds": now,
            "predicted_without_memory": without_memory,
            "memory_gb_per_second": cluster.device.stream_bandwidth / 1e9,
        },
        patch=best.patch,
        expected_effect=best.effect,
        gain=best.gain,
        confidence=0.7,
    )


def _candidates(evidence: Evidence) -> Iterator[Patch]:
    """Yield patches that move fewer bytes for the same arithmetic."""
    plan = evidence.plan
    yield from larger_micro_batches(plan)
    if not plan.compile:
        yield {"plan.compile": True}
    if plan.loss == "logits":
        yield {"plan.loss": "fused"}
    if plan.precision == "fp32":
        yield {"plan.precision": "bf16"}

"""F015: the run differs from its prediction."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, Prediction, show_bytes, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, get_number, step_breakdown

MIN_ERROR_BARS = 1.5  # a run near the edge of the error bar is no finding
CPU_MIN_ERROR_BARS = 3.0  # uncalibrated predictions for CPUs are rough
CALIBRATE = (
    "calibrate this machine with `trimaran bench calibrate`; check clocks, links and memory with `trimaran doctor`"
)
CPU_MIN_STEP_SECONDS = 0.05  # below, operator overhead dominates, which the cost model does not predict


def prediction_off(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if steps take longer, or memory is fuller, than the prediction's error bar allows."""
    measured, prediction = step_breakdown(evidence), evidence.plan.prediction
    if measured is None or prediction is None:
        return
    yield from _seconds(evidence, measured, prediction)
    peak = max((get_number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    over = peak / prediction.peak_bytes - 1 if prediction.peak_bytes else 0.0
    if not _on_cpu(prediction) and over > MIN_ERROR_BARS * prediction.error:
        yield Finding(
            code="F015",
            severity="note",
            verdict=f"a rank uses {show_bytes(peak)}, but {show_bytes(prediction.peak_bytes)} was predicted: "
            f"{over:+.0%} with an error bar of {prediction.error:.0%}",
            culprit="memory",
            evidence={"peak_bytes": peak, "predicted": prediction.peak_bytes, "error": prediction.error},
            fix="find what holds it with --set telemetry.memory_snapshots=true",
            confidence=0.9,
        )


def _seconds(evidence: Evidence, measured: StepBreakdown, prediction: Prediction) -> Iterator[Finding]:
    """Yield a finding about step time. Waits for data and checkpoints are left out, as in the prediction.

    CPU cores are shared with other programs, so on a CPU the node's samples must be there.
    """
    took = measured.step - measured.data - measured.checkpoint
    off, cpu = took / prediction.step_seconds - 1, _on_cpu(prediction)
    others = _others(evidence)
    bar = (CPU_MIN_ERROR_BARS if cpu and not others else MIN_ERROR_BARS) * prediction.error
    if abs(off) <= bar or (cpu and (off < 0 or prediction.step_seconds < CPU_MIN_STEP_SECONDS or not evidence.samples)):
        return
    yield Finding(
        code="F015",
        severity="warning" if off > 0 else "note",
        verdict=f"a step takes {show_seconds(took)}, but {show_seconds(prediction.step_seconds)} was predicted: "
        f"{off:+.0%} with an error bar of {prediction.error:.0%}",
        culprit="other processes" if others else _culprit(measured, prediction),
        evidence={
            "step_seconds": took,
            "predicted": prediction.step_seconds,
            "error": prediction.error,
            "measured": measured.fractions,
            "predicted_time": dict(prediction.time),
            **({"cores_of_others": round(others, 2)} if others else {}),
        },
        fix="stop the other programs on these nodes" if others else CALIBRATE,
        confidence=0.8,
    )


def _culprit(measured: StepBreakdown, prediction: Prediction) -> str:
    """Return the part of a step that exceeds its prediction most."""
    time = prediction.time
    waits = time.get("comm", 0.0) + time.get("bubble", 0.0)
    excess_wait = measured.comm + measured.straggler + measured.bubble - waits
    return "communication" if excess_wait > measured.compute - (prediction.step_seconds - waits) else "compute"


def _others(evidence: Evidence) -> float:
    """Return how many cores other processes use on the busiest node; 0 if at most half a core."""
    found: dict[object, list[float]] = {}
    for sample in evidence.samples:
        cpu, cores, ranks = get_number(sample, "cpu"), get_number(sample, "cores"), sample.get("ranks")
        if cpu is None or cores is None or not isinstance(ranks, dict) or cpu < 0.9:
            continue
        used = [get_number(each, "cpu") for each in ranks.values()]
        if not used or None in used:  # ranks are starting or ending
            continue
        ours = sum(each or 0.0 for each in used)
        ours += sum(get_number(each, "loader_cpu") or 0.0 for each in ranks.values())
        found.setdefault(sample.get("node"), []).append(cpu * cores - ours)
    most = max((median(each) for each in found.values()), default=0.0)
    return most if most > 0.5 else 0.0


def _on_cpu(prediction: Prediction) -> bool:
    return prediction.source.startswith("cpu ")

"""F015: the run is not what was predicted."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, Prediction, show_bytes, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, measure, number

MARGIN = 1.5  # times the error bar: a prediction at its edge is no news
CPU_MARGIN = 3.0  # a first guess of what cores do is rough
MEASURE = "measure this machine: `trimaran bench calibrate`; look at it with `trimaran doctor`: clocks, links, memory"
LEAST_SECONDS = 0.05  # of a step on a CPU: below, starting operators is most of it, which nobody predicts


def prediction_off(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when steps take longer, or memory is fuller, than the prediction's error bar allows."""
    measured, prediction = measure(evidence), evidence.plan.prediction
    if measured is None or prediction is None:
        return
    yield from _seconds(evidence, measured, prediction)
    peak = max((number(each, "peak_bytes") or 0.0 for each in evidence.steps), default=0.0)
    over = peak / prediction.peak_bytes - 1 if prediction.peak_bytes else 0.0
    if not _on_cpu(prediction) and over > MARGIN * prediction.error:
        yield Finding(
            code="F015",
            severity="note",
            verdict=f"a rank holds {show_bytes(peak)} where {show_bytes(prediction.peak_bytes)} were predicted, "
            f"{over:+.0%} with an error bar of {prediction.error:.0%}",
            culprit="memory",
            evidence={"peak_bytes": peak, "predicted": prediction.peak_bytes, "error": prediction.error},
            fix="look who holds it: --set telemetry.memory_snapshots=true",
            confidence=0.9,
        )


def _seconds(evidence: Evidence, measured: StepBreakdown, prediction: Prediction) -> Iterator[Finding]:
    """Yield what is wrong with the seconds. Waiting for data and checkpoints is in no prediction.

    Cores are shared with whatever else runs there: without a look at the machine nothing is said about them.
    """
    took = measured.step - measured.data - measured.checkpoint
    off, cpu = took / prediction.step_seconds - 1, _on_cpu(prediction)
    others = _others(evidence)
    bar = (CPU_MARGIN if cpu and not others else MARGIN) * prediction.error
    if abs(off) <= bar or (cpu and (off < 0 or prediction.step_seconds < LEAST_SECONDS or not evidence.samples)):
        return
    yield Finding(
        code="F015",
        severity="warning" if off > 0 else "note",
        verdict=f"a step takes {show_seconds(took)} where {show_seconds(prediction.step_seconds)} were predicted, "
        f"{off:+.0%} with an error bar of {prediction.error:.0%}",
        culprit="other processes" if others else _culprit(measured, prediction),
        evidence={
            "step_seconds": took,
            "predicted": prediction.step_seconds,
            "error": prediction.error,
            "measured": measured.shares,
            "predicted_time": dict(prediction.time),
            **({"cores_of_others": round(others, 2)} if others else {}),
        },
        fix="end what else runs on these machines" if others else MEASURE,
        confidence=0.8,
    )


def _culprit(measured: StepBreakdown, prediction: Prediction) -> str:
    """Return the part of a step that is farthest above its prediction."""
    time = prediction.time
    waits = time.get("comm", 0.0) + time.get("bubble", 0.0)
    talking = measured.comm + measured.straggler + measured.bubble - waits
    return "communication" if talking > measured.compute - (prediction.step_seconds - waits) else "computing"


def _others(evidence: Evidence) -> float:
    """Return how many cores of the fullest node others use than our ranks and their loaders, if that hurts."""
    found: dict[object, list[float]] = {}
    for sample in evidence.samples:
        cpu, cores, ranks = number(sample, "cpu"), number(sample, "cores"), sample.get("ranks")
        if cpu is None or cores is None or not isinstance(ranks, dict) or cpu < 0.9:
            continue
        used = [number(each, "cpu") for each in ranks.values()]
        if not used or None in used:  # they come or go
            continue
        ours = sum(each or 0.0 for each in used)
        ours += sum(number(each, "loader_cpu") or 0.0 for each in ranks.values())
        found.setdefault(sample.get("node"), []).append(cpu * cores - ours)
    most = max((median(each) for each in found.values()), default=0.0)
    return most if most > 0.5 else 0.0


def _on_cpu(prediction: Prediction) -> bool:
    return prediction.source.startswith("cpu ")

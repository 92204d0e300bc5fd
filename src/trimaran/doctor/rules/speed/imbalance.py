"""F013: tokens or image patches are unevenly distributed over ranks."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, get_number, steady_steps, step_breakdown

MIN_IMBALANCE_RATIO = 1.15  # of the busiest rank's work over the mean
MIN_GAIN_FRACTION = 0.05  # of a step


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the rank with the most tokens or patches, in any step, has clearly more than the mean."""
    measured = step_breakdown(evidence)
    if measured is None or evidence.plan.mesh.dp == 1:
        return
    ratio = _ratio(evidence)
    gain = (1 - 1 / ratio) * (measured.fraction("compute") + measured.fraction("straggler")) if ratio else 0.0
    if ratio is None or ratio < MIN_IMBALANCE_RATIO or gain < MIN_GAIN_FRACTION:
        return
    samples = evidence.recipe.data.samples
    patch: dict[str, object] = {} if samples.balance else {"data.samples.balance": True}
    if not patch and samples.batching == "pad":
        patch = {"data.samples.batching": "pack"}
    yield Finding(
        code="F013",
        severity="warning",
        verdict=f"the busiest rank has {ratio:.2f} times the mean work of a step, and the others wait",
        culprit=_what(evidence, measured),
        evidence={"slowest_over_mean": round(ratio, 3), "balance": samples.balance, "batching": samples.batching},
        patch=patch,
        fix=""
        if patch
        else "samples differ too much for this batch size: use a larger train.global_batch, or limit the largest "
        "images with data.samples.max_pixels",
        expected_effect=f"steps {gain:.0%} shorter" if patch else "",
        gain=gain if patch else None,
        confidence=0.85,
    )


def _ratio(evidence: Evidence) -> float | None:
    """Return the busiest rank's work over the mean, by the cost of rows, or else by tokens; None if unknown."""
    by_cost, by_tokens = [], []
    for step in steady_steps(evidence):
        slowest, cost = get_number(step, "rows", "slowest"), get_number(step, "rows", "cost")
        if slowest and cost:
            by_cost.append(slowest / cost)
        most, usual = get_number(step, "ranks", "tokens", "max"), get_number(step, "ranks", "tokens", "median")
        if most and usual:
            by_tokens.append(most / usual)
    ratios = by_cost or by_tokens
    return median(ratios) if ratios else None


def _what(evidence: Evidence, measured: StepBreakdown) -> str:
    patches = any(get_number(each, "rows", "patches") for each in evidence.steps[-measured.steps :])
    return "image patches" if patches else "tokens"

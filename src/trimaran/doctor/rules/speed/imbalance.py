"""F013: ranks have unequal shares of tokens or images."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, measure, number, settled

UNEQUAL = 1.15  # times the mean: what the fullest rank has to do
WORTH = 0.05  # of a step


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the rank with most tokens or patches takes clearly longer than the mean, whoever it is."""
    measured = measure(evidence)
    if measured is None or evidence.plan.mesh.dp == 1:
        return
    ratio = _ratio(evidence)
    gain = (1 - 1 / ratio) * (measured.share("compute") + measured.share("straggler")) if ratio else 0.0
    if ratio is None or ratio < UNEQUAL or gain < WORTH:
        return
    samples = evidence.recipe.data.samples
    patch: dict[str, object] = {} if samples.balance else {"data.samples.balance": True}
    if not patch and samples.batching == "pad":
        patch = {"data.samples.batching": "pack"}
    yield Finding(
        code="F013",
        severity="warning",
        verdict=f"the rank with the most to do has {ratio:.2f} times the mean share of a step, and the others wait",
        culprit=_what(evidence, measured),
        evidence={"slowest_over_mean": round(ratio, 3), "balance": samples.balance, "batching": samples.batching},
        patch=patch,
        fix=""
        if patch
        else "samples differ too much for this batch: a larger train.global_batch evens them out, or "
        "data.samples.max_pixels makes the largest smaller",
        expected_effect=f"steps {gain:.0%} shorter" if patch else "",
        gain=gain if patch else None,
        confidence=0.85,
    )


def _ratio(evidence: Evidence) -> float | None:
    """Return how much more the fullest rank has than the mean, by what rows cost, or by its tokens."""
    by_cost, by_tokens = [], []
    for step in settled(evidence):
        slowest, cost = number(step, "rows", "slowest"), number(step, "rows", "cost")
        if slowest and cost:
            by_cost.append(slowest / cost)
        most, usual = number(step, "ranks", "tokens", "max"), number(step, "ranks", "tokens", "median")
        if most and usual:
            by_tokens.append(most / usual)
    told = by_cost or by_tokens
    return median(told) if told else None


def _what(evidence: Evidence, measured: StepBreakdown) -> str:
    patches = any(number(each, "rows", "patches") for each in evidence.steps[-measured.steps :])
    return "patches of images" if patches else "tokens"

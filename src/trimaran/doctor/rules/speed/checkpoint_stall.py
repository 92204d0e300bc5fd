"""F007: checkpoints stall training."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from trimaran.core import Finding, Recipe, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, phase_seconds, steady_steps, step_breakdown

MIN_STALL_FRACTION = 0.04  # of the time; with checkpoint.every=auto it stays below 0.005
LONG_STALL_FRACTION = 0.25  # of a typical step
PATCHED_STALL_FRACTION = 0.01  # of the time, with asynchronous checkpoints at a fixed interval


def checkpoint_stall(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if checkpoints take too much of the time."""
    measured = step_breakdown(evidence)
    # The run tunes how often it copies the state in its first steps, so the later half must stall as well.
    if measured is None or min(measured.fraction("checkpoint"), _later_fraction(evidence)) < MIN_STALL_FRACTION:
        return
    usual = measured.compute + measured.comm + measured.bubble + measured.straggler
    stalls = [
        (each["step"], seconds)
        for each in steady_steps(evidence)
        if (seconds := phase_seconds(each, "checkpoint")) > LONG_STALL_FRACTION * usual
    ]
    stall = fmean(seconds for _, seconds in stalls) if stalls else measured.checkpoint
    every = median(after - before for (before, _), (after, _) in pairwise(stalls)) if len(stalls) > 1 else 1
    patch, left = _patch(evidence.recipe, measured, stall, usual)
    gain = measured.fraction("checkpoint") - left
    yield Finding(
        code="F007",
        severity="warning",
        verdict=f"training stalls for checkpoints {measured.fraction('checkpoint'):.0%} of the time: "
        f"{show_seconds(stall)} every {every:.0f} steps, and a step takes {show_seconds(usual)}",
        culprit="checkpoint interval" if evidence.recipe.checkpoint.asynchronous else "synchronous checkpoints",
        evidence={
            "checkpoint_share": round(measured.fraction("checkpoint"), 4),
            "stall_seconds": stall,
            "every_steps": every,
            "asynchronous": evidence.recipe.checkpoint.asynchronous,
        },
        patch=patch,
        fix="" if patch else "the copy itself is slow: check the host's memory and the disk with `trimaran doctor`",
        expected_effect=f"steps {gain:.0%} shorter on average" if patch else "",
        gain=gain if patch else None,
        confidence=0.9,
    )


def _later_fraction(evidence: Evidence) -> float:
    """Return the fraction of the time that checkpoints took in the later half of the steps."""
    steps = steady_steps(evidence)
    later = steps[len(steps) // 2 :]
    return sum(phase_seconds(each, "checkpoint") for each in later) / sum(each["step_seconds"] for each in later)


def _patch(recipe: Recipe, measured: StepBreakdown, stall: float, usual: float) -> tuple[dict[str, object], float]:
    """Return the patch that makes stalls short or rare, and the fraction of the time that remains."""
    if not recipe.checkpoint.asynchronous:
        return {"checkpoint.asynchronous": True}, PATCHED_STALL_FRACTION
    if recipe.checkpoint.every not in ("auto", "off"):
        return {"checkpoint.every": "auto"}, PATCHED_STALL_FRACTION / 2
    if recipe.checkpoint.memory not in ("auto", 0):
        return {"checkpoint.memory": "auto"}, PATCHED_STALL_FRACTION / 2
    return {}, measured.fraction("checkpoint")

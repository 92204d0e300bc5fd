"""F007: training stands still while its state is kept."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from trimaran.core import Finding, Recipe, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import StepBreakdown, measure, phase, settled

SHARE = 0.04  # of the time; left alone, it is kept below 0.005
LONG = 0.25  # of a usual step: a pause that people see
COSTS = 0.01  # of the time that checkpoints may cost where their distance is set


def checkpoint_stall(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when keeping the state costs too much of the time."""
    measured = measure(evidence)
    # How often copies are made is found out in the first steps: what has been mended since is no finding.
    if measured is None or min(measured.share("checkpoint"), _share_lately(evidence)) < SHARE:
        return
    usual = measured.compute + measured.comm + measured.bubble + measured.straggler
    pauses = [
        (each["step"], seconds) for each in settled(evidence) if (seconds := phase(each, "checkpoint")) > LONG * usual
    ]
    stall = fmean(seconds for _, seconds in pauses) if pauses else measured.checkpoint
    every = median(after - before for (before, _), (after, _) in pairwise(pauses)) if len(pauses) > 1 else 1
    patch, left = _patch(evidence.recipe, measured, stall, usual)
    gain = measured.share("checkpoint") - left
    yield Finding(
        code="F007",
        severity="warning",
        verdict=f"training stands still for checkpoints {measured.share('checkpoint'):.0%} of the time: "
        f"{show_seconds(stall)} every {every:.0f} steps, and a step takes {show_seconds(usual)}",
        culprit="written while all wait" if not evidence.recipe.checkpoint.asynchronous else "how often state is kept",
        evidence={
            "checkpoint_share": round(measured.share("checkpoint"), 4),
            "stall_seconds": stall,
            "every_steps": every,
            "asynchronous": evidence.recipe.checkpoint.asynchronous,
        },
        patch=patch,
        fix=""
        if patch
        else "the copy itself is slow: look at the host's memory and at the disk with `trimaran doctor`",
        expected_effect=f"steps {gain:.0%} shorter on average" if patch else "",
        gain=gain if patch else None,
        confidence=0.9,
    )


def _share_lately(evidence: Evidence) -> float:
    """Return the share of the time that keeping the state took in the later half of the steps."""
    steps = settled(evidence)
    later = steps[len(steps) // 2 :]
    return sum(phase(each, "checkpoint") for each in later) / sum(each["step_seconds"] for each in later)


def _patch(recipe: Recipe, measured: StepBreakdown, stall: float, usual: float) -> tuple[dict[str, object], float]:
    """Return what makes the pauses short or rare, and the share of the time that is left of them."""
    if not recipe.checkpoint.asynchronous:
        return {"checkpoint.asynchronous": True}, COSTS
    if recipe.checkpoint.every != "auto":
        return {"checkpoint.every": "auto"}, COSTS / 2
    if recipe.checkpoint.memory not in ("auto", 0):
        return {"checkpoint.memory": "auto"}, COSTS / 2
    return {}, measured.share("checkpoint")

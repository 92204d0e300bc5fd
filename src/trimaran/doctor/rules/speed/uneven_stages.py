"""F011: the stages of a pipeline are uneven."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import best_patch
from trimaran.doctor.step_breakdown import get_number, steady_steps, step_breakdown

MIN_EXCESS_BUBBLE = 0.1  # of the time, above the schedule's theoretical bubble
MIN_STAGE_RATIO = 1.25  # of the busiest stage over the median stage


def uneven_stages(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the pipeline bubble is clearly above its schedule's, or one stage is clearly busier."""
    measured, plan = step_breakdown(evidence), evidence.plan
    if measured is None or plan.mesh.pp == 1:
        return
    steps = steady_steps(evidence)
    bubble = median(get_number(each, "bubble", "measured") or 0.0 for each in steps)
    expected = plan.bubble
    busy = [
        (most / usual, int(get_number(each, "ranks", "busy_seconds", "at") or 0))
        for each in steps
        if (most := get_number(each, "ranks", "busy_seconds", "max"))
        and (usual := get_number(each, "ranks", "busy_seconds", "median"))
    ]
    ratio, rank = sorted(busy)[len(busy) // 2] if busy else (None, None)
    if bubble < expected + MIN_EXCESS_BUBBLE and (ratio is None or ratio < MIN_STAGE_RATIO):
        return
    pinned = plan.pipeline.stages
    patches = [{"plan.pipeline.stages": []}, *({"plan.pipeline.stages": each} for each in _even(pinned))]
    best = best_patch(evidence, measured, patches) if pinned else None
    if best is None:
        return
    yield Finding(
        code="F011",
        severity="warning",
        verdict=f"the pipeline bubble is {bubble:.0%} of the time, the schedule's is {expected:.0%}: its stages of "
        f"{', '.join(map(str, pinned))} layers are uneven",
        culprit=f"rank {rank}" if rank is not None else f"the stage of {max(pinned)} layers",
        evidence={"measured_bubble": round(bubble, 4), "theoretical_bubble": round(expected, 4), "stages": list(pinned),
                  **({"busiest_over_median": round(ratio, 3)} if ratio else {})},
        patch=best.patch,
        expected_effect=best.effect,
        gain=best.gain,
        confidence=0.85,
    )  # fmt: skip


def _even(stages: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield ever more even splits: each moves one layer from the largest stage to the smallest."""
    now = list(stages)
    while now and max(now) - min(now) > 1:
        now[now.index(max(now))] -= 1
        now[now.index(min(now))] += 1
        yield list(now)

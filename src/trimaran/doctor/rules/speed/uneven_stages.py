"""F011: one stage of a pipeline has more to do than the others."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import best_of
from trimaran.doctor.step_breakdown import measure, number, settled

WAITS = 0.1  # of the pipeline's time, above what its schedule has in theory
UNEVEN = 1.25  # times the median stage


def uneven_stages(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when ranks of a pipeline wait clearly longer than its schedule makes them, for one of them."""
    measured, plan = measure(evidence), evidence.plan
    if measured is None or plan.mesh.pp == 1:
        return
    steps = settled(evidence)
    waited = median(number(each, "bubble", "measured") or 0.0 for each in steps)
    theory = plan.bubble
    busy = [
        (most / usual, int(number(each, "ranks", "busy_seconds", "at") or 0))
        for each in steps
        if (most := number(each, "ranks", "busy_seconds", "max"))
        and (usual := number(each, "ranks", "busy_seconds", "median"))
    ]
    ratio, rank = sorted(busy)[len(busy) // 2] if busy else (None, None)
    if waited < theory + WAITS and (ratio is None or ratio < UNEVEN):
        return
    pinned = plan.pipeline.stages
    patches = [{"plan.pipeline.stages": []}, *({"plan.pipeline.stages": each} for each in _even(pinned))]
    remedy = best_of(evidence, measured, patches) if pinned else None
    if remedy is None:
        return
    yield Finding(
        code="F011",
        severity="warning",
        verdict=f"the pipeline waits {waited:.0%} of its time where {theory:.0%} are its schedule's: its stages of "
        f"{', '.join(map(str, pinned))} layers are uneven",
        culprit=f"rank {rank}" if rank is not None else f"the stage of {max(pinned)} layers",
        evidence={"measured_bubble": round(waited, 4), "theoretical_bubble": round(theory, 4), "stages": list(pinned),
                  **({"busiest_over_median": round(ratio, 3)} if ratio else {})},
        patch=remedy.patch,
        expected_effect=remedy.effect,
        gain=remedy.gain,
        confidence=0.85,
    )  # fmt: skip


def _even(stages: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield the splits in which one layer of the largest stage goes to the smallest, again and again."""
    now = list(stages)
    while now and max(now) - min(now) > 1:
        now[now.index(max(now))] -= 1
        now[now.index(min(now))] += 1
        yield list(now)

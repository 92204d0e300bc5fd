"""F011: the stages of a pipeline are uneven."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.predicted_gain import MIN_GAIN_FRACTION, PredictedGain, best_patch, predicted_gain
from trimaran.doctor.step_breakdown import StepBreakdown, get_number, steady_steps, step_breakdown
from trimaran.planner.balance_stages import MeasuredStages, balanced_cut, present_cut

MIN_MEASURED_STEPS = 8  # whose stages were measured under the present cut
MIN_EXCESS_BUBBLE = 0.1  # of the time, above the schedule's theoretical bubble
MIN_STAGE_RATIO = 1.25  # of the busiest stage over the median stage


def uneven_stages(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if another cut of the measured stages shortens steps.

    Runs of earlier versions did not measure stages: there, the pipeline bubble must be clearly above its schedule's, or
    one stage clearly busier, and the cost model says whether another cut helps.
    """
    measured, plan = step_breakdown(evidence), evidence.plan
    if measured is None or plan.mesh.pp == 1:
        return
    if (stages := measured_stages(evidence)) is not None:
        yield from _of_measured_stages(evidence, measured, stages)
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


def measured_stages(evidence: Evidence) -> MeasuredStages | None:
    """Return the median time of each stage under the present cut; None with too few steps that have it."""
    found = [each["bubble"] for each in steady_steps(evidence) if isinstance(each.get("bubble"), dict)]
    cuts = [each.get("stage_layers") for each in found]
    if not cuts or not cuts[-1]:
        return None
    # Lines may repeat the measurement of an earlier cut, until the next one is written.
    rows = [each["stage_seconds"] for each, cut in zip(found, cuts, strict=True) if cut == cuts[-1]]
    wanted = evidence.plan.pipeline.stages
    if len(rows) < MIN_MEASURED_STEPS or (wanted and list(wanted) != cuts[-1]):
        return None
    return MeasuredStages(layers=tuple(cuts[-1]), seconds=tuple(median(column) for column in zip(*rows, strict=True)))


def _of_measured_stages(evidence: Evidence, measured: StepBreakdown, stages: MeasuredStages) -> Iterator[Finding]:
    plan, question = evidence.plan, evidence.planner_inputs()
    if question is None or question.outline is None:
        return
    now = present_cut(stages, plan)
    best = balanced_cut(stages, plan, question.outline, seq_len=evidence.recipe.data.seq_len)
    if best is None or best.layers == now.layers:
        return
    saved = min(now.step_seconds, measured.step) * (1 - best.step_seconds / now.step_seconds)
    gain = PredictedGain({"plan.pipeline.stages": list(best.layers)}, saved / measured.step)
    if gain.gain < MIN_GAIN_FRACTION or predicted_gain(evidence, measured, gain.patch) is None:  # it cannot run
        return
    longest = max(range(len(now.seconds)), key=lambda number: now.seconds[number])
    yield Finding(
        code="F011",
        severity="warning",
        verdict=f"stage {longest} of the pipeline takes {show_seconds(now.seconds[longest])} of each micro-batch, the "
        f"median stage {show_seconds(median(now.seconds))}: its stages of {', '.join(map(str, now.layers))} layers are "
        "uneven",
        culprit=f"stage {longest}",
        evidence={"stages": list(now.layers), "stage_seconds": [round(each, 6) for each in now.seconds],
                  "expected_stage_seconds": [round(each, 6) for each in best.seconds],
                  "measured_bubble": round(measured.fraction("bubble"), 4)},
        patch=gain.patch,
        expected_effect=gain.effect,
        gain=gain.gain,
        confidence=0.9,
    )  # fmt: skip


def _even(stages: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield ever more even splits: each moves one layer from the largest stage to the smallest."""
    now = list(stages)
    while now and max(now) - min(now) > 1:
        now[now.index(max(now))] -= 1
        now[now.index(min(now))] += 1
        yield list(now)

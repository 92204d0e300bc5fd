"""Rules about uneven work: of ranks, pipeline stages and experts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from trimaran.core import Finding, Recipe, UserError, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.predicted_gain import MIN_GAIN_FRACTION, Patch, Remedy, best_patch, predicted_gain, remedy_fields
from trimaran.doctor.step_breakdown import MIN_STEPS, StepBreakdown, get_number, steady_steps, step_breakdown
from trimaran.machine import HARDWARE_THROTTLE_REASONS
from trimaran.models import decoder_of, spec_of
from trimaran.planner import MeasuredStages, balanced_cut, can_measure_rows, present_cut

MIN_SLOWDOWN = 1.25  # over the median rank
MIN_LOST_FRACTION = 0.05  # of a step that all ranks wait
# Times of a rank's own work. Backward is left out: there a rank may wait for others and look as busy as they are.
COMPUTE_TIMES = ("forward_seconds", "busy_seconds")
OWN_TIMES = (*COMPUTE_TIMES, "data_seconds")
# Of the steps, in the earlier and in the later half, in which the same rank must be the slowest; else it is chance or
# the data. Of two ranks one is always slower.
MIN_SAME_RANK_FRACTION, MIN_SAME_RANK_FRACTION_OF_TWO = 0.6, 0.8
MIN_EXPLAINED_BY_TOKENS = 0.5  # of the slowdown, to blame the data
UNEVEN_DATA_FIX = "balance rows over ranks by their cost: pack them, and keep data.samples.balance on"
SLOW_NODE_FIX = (
    "check its node with `trimaran doctor`: clocks, other processes, a slow link; if it stays slow, leave it out"
)


class SlowRank(NamedTuple):
    """A rank with the highest value of `what` in most steps: its value (`most`), and the median rank's (`usual`)."""

    what: str
    rank: int
    most: float
    usual: float

    @property
    def lost(self) -> float:
        return self.most - self.usual

    @property
    def ratio(self) -> float:
        return self.most / self.usual if self.usual else 1.0


def straggler(evidence: Evidence) -> Iterator[Finding]:
    """Yield F005 for a rank that delays the others: which, by how much, and whether by hardware or data."""
    # With a pipeline only the supervisor's incidents count, because stages have different work.
    measured, plan = step_breakdown(evidence), evidence.plan
    if plan.mesh.world_size == 1 or measured is None:
        return
    slow = slow_rank(evidence, OWN_TIMES)
    if slow is None:
        # If the ranks' own times show none: those that the supervisor reported.
        reported = [each for each in evidence.incidents if each.get("cause") == "straggler"]
        for suspects, incident in {tuple(each.get("suspects") or ()): each for each in reported}.items():
            slowdown = get_number(incident, "evidence", "slowdown")
            yield Finding(
                code="F005",
                severity="warning",
                verdict=str(incident.get("what", f"rank {suspects} is slow")),
                culprit=", ".join(f"rank {each}" for each in suspects),
                evidence={"slowdown": slowdown, "kind": "hardware", "incident": incident.get("id")},
                fix=SLOW_NODE_FIX,
                gain=1 - 1 / slowdown if slowdown and slowdown > 1 else None,
                confidence=0.8,
            )
        return
    tokens = _slowest(evidence, "tokens")
    token_ratio = tokens.most / tokens.usual if tokens and tokens.rank == slow.rank and tokens.usual else 1.0
    is_data = token_ratio - 1 > MIN_EXPLAINED_BY_TOKENS * (slow.ratio - 1)
    why = "it has more tokens than the others" if is_data else _hardware_reason(evidence, slow)
    balance = is_data and not evidence.recipe.data.samples.balance
    patch: Patch = {"data.samples.balance": True} if balance else {}
    gain, effect = min(slow.lost, measured.step) / measured.step, "without it"
    if not is_data and slow.what != "data_seconds" and can_measure_rows(plan):
        patch = valid_patch(evidence.recipe, {"plan.micro_batches": "measured"})
        speeds = (plan.mesh.dp - 1) / slow.usual + 1 / slow.most  # each data rank has rows in proportion to its speed
        gain, effect = (slow.most - plan.mesh.dp / speeds) / measured.step, "with rows by measured speed"
    yield Finding(
        code="F005",
        severity="warning",
        verdict=f"rank {slow.rank} needs {slow.ratio:.1f} times as long as the others for its own work, and all wait "
        f"for it {show_seconds(slow.lost)} per step: {why}",
        culprit=f"rank {slow.rank}",
        evidence={
            slow.what: {"median": slow.usual, "max": slow.most, "at": slow.rank},
            "tokens": {"max_over_median": round(token_ratio, 3)},
            "kind": "data" if is_data else "hardware",
        },
        patch=patch,
        fix="" if balance else UNEVEN_DATA_FIX if is_data else SLOW_NODE_FIX,
        expected_effect=f"steps {gain:.0%} shorter {effect}",
        gain=gain,
        confidence=0.85,
    )


def _slowest(evidence: Evidence, what: str) -> SlowRank | None:
    """Return the rank with the highest `what` in most steps; None if no rank is."""
    stats: list[Line] = [
        each
        for step in steady_steps(evidence)
        if isinstance(ranks := step.get("ranks"), dict) and isinstance(each := ranks.get(what), dict)
    ]
    if len(stats) < MIN_STEPS:
        return None
    is_pair = evidence.plan.mesh.world_size == 2
    min_fraction = MIN_SAME_RANK_FRACTION_OF_TWO if is_pair else MIN_SAME_RANK_FRACTION
    rank = Counter(each.get("at") for each in stats).most_common(1)[0][0]
    for half in (stats[: len(stats) // 2], stats[len(stats) // 2 :]):
        if sum(each.get("at") == rank for each in half) < min_fraction * len(half):
            return None
    own = [each for each in stats if each.get("at") == rank]
    others = "min" if is_pair else "median"
    most, usual = (median(get_number(each, name) or 0.0 for each in own) for name in ("max", others))
    return SlowRank(what, int(rank or 0), most, usual)


def slow_rank(evidence: Evidence, times: Sequence[str] = COMPUTE_TIMES) -> SlowRank | None:
    """Return the rank that delays the others most by one of these times; None if there is none, or with a pipeline."""
    measured, mesh = step_breakdown(evidence), evidence.plan.mesh
    if measured is None or mesh.pp > 1 or mesh.world_size == 1:
        return None
    found = filter(None, (_slowest(evidence, what) for what in times))
    least = MIN_LOST_FRACTION * measured.step
    slow = [each for each in found if each.ratio >= MIN_SLOWDOWN and each.lost >= least]
    return max(slow, key=lambda each: each.lost, default=None)


def _hardware_reason(evidence: Evidence, slow: SlowRank) -> str:
    """Return why a rank is slow that has no more work than the others, as far as the samples show."""
    if slow.what == "data_seconds":
        return "its batches arrive late"
    reasons: Counter[str] = Counter()
    for sample in evidence.samples:
        ranks = sample.get("ranks")
        if isinstance(ranks, dict) and str(slow.rank) in ranks:
            active = (reason for gpu in sample.get("gpus") or () for reason in gpu.get("throttle") or ())
            reasons.update(reason for reason in active if reason in HARDWARE_THROTTLE_REASONS)
    if reasons:
        return f"its node's GPUs are throttled ({reasons.most_common(1)[0][0].replace('_', ' ')})"
    return "it has as much work as the others, so its device or its node is slow"


MIN_IMBALANCE_RATIO = 1.15  # of the busiest rank's work over the mean


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """Yield F013 if the rank with the most tokens or patches, in any step, has clearly more than the mean."""
    measured = step_breakdown(evidence)
    if measured is None or evidence.plan.mesh.dp == 1:
        return
    # By the cost of rows, or else by tokens.
    by_cost, by_tokens = [], []
    for step in steady_steps(evidence):
        slowest, cost = get_number(step, "rows", "slowest"), get_number(step, "rows", "cost")
        if slowest and cost:
            by_cost.append(slowest / cost)
        most, usual = get_number(step, "ranks", "tokens", "max"), get_number(step, "ranks", "tokens", "median")
        if most and usual:
            by_tokens.append(most / usual)
    ratios = by_cost or by_tokens
    ratio = median(ratios) if ratios else None
    gain = (1 - 1 / ratio) * (measured.fraction("compute") + measured.fraction("straggler")) if ratio else 0.0
    if ratio is None or ratio < MIN_IMBALANCE_RATIO or gain < MIN_GAIN_FRACTION:
        return
    samples = evidence.recipe.data.samples
    has_patches = any(get_number(each, "rows", "patches") for each in evidence.steps[-measured.steps :])
    patch: Patch = {} if samples.balance else {"data.samples.balance": True}
    if not patch and samples.batching == "pad":
        patch = {"data.samples.batching": "pack"}
    yield Finding(
        code="F013",
        severity="warning",
        verdict=f"the busiest rank has {ratio:.2f} times the mean work of a step, and the others wait",
        culprit="image patches" if has_patches else "tokens",
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


MIN_MEASURED_STEPS = 8  # whose stages were measured under the present cut
MIN_EXCESS_BUBBLE = 0.1  # of the time, above the schedule's theoretical bubble
MIN_STAGE_RATIO = 1.25  # of the busiest stage over the median stage


def uneven_stages(evidence: Evidence) -> Iterator[Finding]:
    """Yield F011 if another cut of the measured stages shortens steps."""
    # Runs of earlier versions did not measure stages: there, the pipeline bubble must be clearly above its schedule's,
    # or one stage clearly busier, and the cost model says whether another cut helps.
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
    patches: list[Patch] = [{"plan.pipeline.stages": []}]
    even = list(pinned)
    while even and max(even) - min(even) > 1:
        even[even.index(max(even))] -= 1
        even[even.index(min(even))] += 1
        patches.append({"plan.pipeline.stages": list(even)})
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
        **remedy_fields(best),
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
    patch, gain = {"plan.pipeline.stages": list(best.layers)}, saved / measured.step
    if gain < MIN_GAIN_FRACTION or predicted_gain(evidence, measured, patch) is None:  # it cannot run
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
        **remedy_fields(Remedy(patch, gain, f"steps {gain:.0%} shorter")),
        confidence=0.9,
    )  # fmt: skip


WINDOW_STEPS = 50  # the last ones, whose medians count
FIRST_STEPS = 50  # not judged: a router that starts from random weights needs some steps to spread its tokens
MAX_IDLE_FRACTION = 0.2
MIN_ENTROPY = 0.6  # of the loads of a layer's experts, 1 if all are equal
USUAL_BALANCE, USUAL_RATE = 0.01, 0.001
MAX_BALANCE = 1.0


def expert_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Yield F076 if for many steps many experts got no token, or few experts got nearly all."""
    late = [each.get("router") for each in evidence.steps if each["step"] > FIRST_STEPS]
    routers = [each for each in late if isinstance(each, dict) and {"idle", "entropy"} <= each.keys()]
    if len(routers) < WINDOW_STEPS:
        return
    idle, entropy = (median(float(each[name]) for each in routers[-WINDOW_STEPS:]) for name in ("idle", "entropy"))
    if idle <= MAX_IDLE_FRACTION and entropy >= MIN_ENTROPY:
        return
    yield Finding(
        code="F076",
        severity="warning",
        verdict=f"in the last {WINDOW_STEPS} steps {idle:.0%} of the experts got no token, and the entropy of their "
        f"loads is {entropy:.2f} of the largest possible: the routers use few experts",
        culprit="the routers",
        evidence={"idle": idle, "entropy": entropy, "imbalance": routers[-1].get("imbalance")},
        patch=_stronger_balance(evidence.recipe),
        expected_effect="tokens are spread over more experts within some hundred steps",
        confidence=0.8,
    )


def _stronger_balance(recipe: Recipe) -> Patch:
    """Return the patch: a faster correction bias where there is one, else ten times the balance loss."""
    try:
        decoder = decoder_of(spec_of(recipe.model))
    except UserError:
        return {}
    experts = None if decoder is None else decoder.block.experts
    if experts is None:
        return {}
    if experts.router.correction:
        rate = max(USUAL_RATE, 2 * experts.router.correction_rate)
        return valid_patch(recipe, {"model.shape.experts.router.correction_rate": rate})
    balance = min(MAX_BALANCE, max(USUAL_BALANCE, 10 * experts.balance))
    return valid_patch(recipe, {"model.shape.experts.balance": balance})

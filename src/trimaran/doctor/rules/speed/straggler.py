"""F005: a straggler: one rank is slower than the others, and all wait for it."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from trimaran.core import Finding, Plan, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import MIN_STEPS, StepBreakdown, get_number, steady_steps, step_breakdown
from trimaran.planner.unequal_rules import can_measure_rows
from trimaran.telemetry.nvml import HARDWARE_THROTTLE_REASONS

MIN_SLOWDOWN = 1.25  # over the median rank
MIN_LOST_FRACTION = 0.05  # of a step that all ranks wait
# Times of a rank's own work. Backward is left out: there a rank may wait for others and look as busy as they are.
OWN_TIMES = ("forward_seconds", "busy_seconds", "data_seconds")
# Of the steps, in the earlier and in the later half, in which the same rank must be the slowest; else it is chance or
# the data. Of two ranks one is always slower.
MIN_SAME_RANK_FRACTION, MIN_SAME_RANK_FRACTION_OF_TWO = 0.6, 0.8
MIN_EXPLAINED_BY_TOKENS = 0.5  # of the slowdown, to blame the data


def straggler(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for a rank that delays the others: which, by how much, and whether by hardware or data.

    With a pipeline only the supervisor's incidents count, because stages have different work.
    """
    measured, mesh = step_breakdown(evidence), evidence.plan.mesh
    if mesh.world_size == 1 or measured is None:
        return
    slowest = [_slowest(evidence, what) for what in OWN_TIMES] if mesh.pp == 1 else []
    slow = [each for each in slowest if each and each.is_slow(measured)]
    if not slow:
        yield from _from_incidents(evidence)
        return
    yield _finding(evidence, measured, max(slow, key=lambda each: each.lost))


def _finding(evidence: Evidence, measured: StepBreakdown, slow: "SlowRank") -> Finding:
    tokens = _slowest(evidence, "tokens")
    token_ratio = tokens.most / tokens.usual if tokens and tokens.rank == slow.rank and tokens.usual else 1.0
    is_data = token_ratio - 1 > MIN_EXPLAINED_BY_TOKENS * (slow.ratio - 1)
    why = "it has more tokens than the others" if is_data else _hardware_reason(evidence, slow)
    balance = is_data and not evidence.recipe.data.samples.balance
    patch: Patch = {"data.samples.balance": True} if balance else {}
    gain, effect = min(slow.lost, measured.step) / measured.step, "without it"
    if not is_data and slow.what != "data_seconds" and can_measure_rows(evidence.plan):
        patch = valid_patch(evidence.recipe, {"plan.micro_batches": "measured"})
        gain, effect = _dealt(evidence.plan, slow) / measured.step, "with rows by measured speed"
    return Finding(
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
        fix="" if balance else _fix(is_data),
        expected_effect=f"steps {gain:.0%} shorter {effect}",
        gain=gain,
        confidence=0.85,
    )


def _dealt(plan: Plan, slow: "SlowRank") -> float:
    """Return the seconds of a step that are saved if each data rank has rows in proportion to its speed."""
    speeds = (plan.mesh.dp - 1) / slow.usual + 1 / slow.most
    return slow.most - plan.mesh.dp / speeds


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

    def is_slow(self, measured: StepBreakdown) -> bool:
        return self.ratio >= MIN_SLOWDOWN and self.lost >= MIN_LOST_FRACTION * measured.step


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


def slow_computer(evidence: Evidence) -> SlowRank | None:
    """Return the rank whose compute all others wait for; None if there is none, or with a pipeline."""
    measured = step_breakdown(evidence)
    if measured is None or evidence.plan.mesh.pp > 1 or evidence.plan.mesh.world_size == 1:
        return None
    found = [_slowest(evidence, what) for what in OWN_TIMES if what != "data_seconds"]
    return max((each for each in found if each and each.is_slow(measured)), key=lambda each: each.lost, default=None)


def _from_incidents(evidence: Evidence) -> Iterator[Finding]:
    """Yield the stragglers that the supervisor reported, if the ranks' own times show none."""
    latest = {
        tuple(each.get("suspects") or ()): each for each in evidence.incidents if each.get("cause") == "straggler"
    }
    for suspects, incident in latest.items():
        slowdown = get_number(incident, "evidence", "slowdown")
        yield Finding(
            code="F005",
            severity="warning",
            verdict=str(incident.get("what", f"rank {suspects} is slow")),
            culprit=", ".join(f"rank {each}" for each in suspects),
            evidence={"slowdown": slowdown, "kind": "hardware", "incident": incident.get("id")},
            fix=_fix(is_data=False),
            gain=1 - 1 / slowdown if slowdown and slowdown > 1 else None,
            confidence=0.8,
        )


def _hardware_reason(evidence: Evidence, slow: "SlowRank") -> str:
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


def _fix(is_data: bool) -> str:
    if is_data:
        return "balance rows over ranks by their cost: pack them, and keep data.samples.balance on"
    return "check its node with `trimaran doctor`: clocks, other processes, a slow link; if it stays slow, leave it out"

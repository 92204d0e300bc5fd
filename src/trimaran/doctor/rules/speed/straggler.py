"""F005: one rank is slower than the others, and all wait for it."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.step_breakdown import FEWEST, StepBreakdown, measure, number, settled
from trimaran.telemetry.nvml import FAULTS

SLOWER = 1.25  # times the median rank
WORTH = 0.05  # of a step: what all must wait for it
# What a rank takes for itself. In a backward it may wait for others, and looks as busy as they are.
OWN = ("forward_seconds", "busy_seconds", "data_seconds")
# Of the steps, early and late ones, in which it must be the same rank: else it is chance, or the data. Of two ranks one
# is always the slower.
SAME, SAME_OF_TWO = 0.6, 0.8
WORK = 0.5  # of the slowness that more tokens must explain to blame the data


def straggler(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for a rank that holds the others up: who, by how much, and whether hardware or data.

    Stages of a pipeline are not alike, so there only the supervisor can tell.
    """
    measured, mesh = measure(evidence), evidence.plan.mesh
    if mesh.world_size == 1 or measured is None:
        return
    spreads = [_spread(evidence, what) for what in OWN] if mesh.pp == 1 else []
    slow = [each for each in spreads if each and each.is_slow(measured)]
    if not slow:
        yield from _noticed(evidence)
        return
    yield _finding(evidence, measured, max(slow, key=lambda each: each.lost))


def _finding(evidence: Evidence, measured: StepBreakdown, slow: "Slow") -> Finding:
    tokens = _spread(evidence, "tokens")
    heavier = tokens.most / tokens.usual if tokens and tokens.rank == slow.rank and tokens.usual else 1.0
    is_data = heavier - 1 > WORK * (slow.ratio - 1)
    why = "it has more tokens than the others" if is_data else _hardware(evidence, slow)
    balance = is_data and not evidence.recipe.data.samples.balance
    gain = min(slow.lost, measured.step) / measured.step
    return Finding(
        code="F005",
        severity="warning",
        verdict=f"rank {slow.rank} needs {slow.ratio:.1f} times as long as the others for its own work, and all wait "
        f"for it {show_seconds(slow.lost)} a step: {why}",
        culprit=f"rank {slow.rank}",
        evidence={
            slow.what: {"median": slow.usual, "max": slow.most, "at": slow.rank},
            "tokens": {"max_over_median": round(heavier, 3)},
            "kind": "data" if is_data else "hardware",
        },
        patch={"data.samples.balance": True} if balance else {},
        fix="" if balance else _fix(is_data),
        expected_effect=f"steps {gain:.0%} shorter without it",
        gain=gain,
        confidence=0.85,
    )


class Slow(NamedTuple):
    """A rank that has more of something than the others, most of the time: its value, and the median rank's."""

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
        return self.ratio >= SLOWER and self.lost >= WORTH * measured.step


def _spread(evidence: Evidence, what: str) -> Slow | None:
    """Return who is above the others most of the time; None if nobody is."""
    told: list[Line] = [
        spread
        for step in settled(evidence)
        if isinstance(ranks := step.get("ranks"), dict) and isinstance(spread := ranks.get(what), dict)
    ]
    if len(told) < FEWEST:
        return None
    pair = evidence.plan.mesh.world_size == 2
    rank = Counter(each.get("at") for each in told).most_common(1)[0][0]
    for half in (told[: len(told) // 2], told[len(told) // 2 :]):
        if sum(each.get("at") == rank for each in half) < (SAME_OF_TWO if pair else SAME) * len(half):
            return None
    own = [each for each in told if each.get("at") == rank]
    others = "min" if pair else "median"
    most, usual = (median(number(each, name) or 0.0 for each in own) for name in ("max", others))
    return Slow(what, int(rank or 0), most, usual)


def _noticed(evidence: Evidence) -> Iterator[Finding]:
    """Yield what the supervisor noticed, where ranks have not measured themselves."""
    latest = {
        tuple(each.get("suspects") or ()): each for each in evidence.incidents if each.get("cause") == "straggler"
    }
    for suspects, incident in latest.items():
        slowdown = number(incident, "evidence", "slowdown")
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


def _hardware(evidence: Evidence, slow: "Slow") -> str:
    """Return what is known of a slow rank that has no more to do than the others."""
    if slow.what == "data_seconds":
        return "its batches come late"
    reasons: Counter[str] = Counter()
    for sample in evidence.samples:
        ranks = sample.get("ranks")
        if isinstance(ranks, dict) and str(slow.rank) in ranks:
            told = (reason for gpu in sample.get("gpus") or () for reason in gpu.get("throttle") or ())
            reasons.update(reason for reason in told if reason in FAULTS)
    if reasons:
        return f"its node's GPUs are held back by {reasons.most_common(1)[0][0].replace('_', ' ')}"
    return "it has as much work as the others, so it is its device or its node"


def _fix(is_data: bool) -> str:
    if is_data:
        return "deal rows by what they cost: pack them, and keep data.samples.balance on"
    return (
        "look at its node with `trimaran doctor`: clocks, other processes, a slow link; leave the node out if it stays"
    )

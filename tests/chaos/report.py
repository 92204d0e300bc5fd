"""What a soak has found, as a table: goodput, detection, recovery, loss, beside what others were measured at."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import Incident

LEAST_GOODPUT = 0.90
PEERS = (
    ("torchrun, store fix: kill -9", "0.2", "4.0 to 6.8", "1 to 4", "6 of 6 resumed"),
    ("torchrun, defaults: kill -9", "0.2", "8.3, 14.8 or never", "1 to 4", "1 clean run of 4"),
    ("torchrun, 10 s timeout: SIGSTOP", "10", "45.8", "-", "no rank named"),
    ("NVRx 0.4.1: SIGSTOP", "10.0", "13.0", "-", "no rank named"),
    ("torchft nightly: kill -9, SIGSTOP", "5.0", "5.0 stall", "0", "of the surviving replica"),
)
"""Measured on the same machine with the same job, see `research/reliability_ops_ux.md` 1.4: what, seconds to detect,
seconds to the first new step, lost steps, remarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One fault and what became of it. Seconds and steps are None where they do not apply; `incident` is None when
    nobody noticed, or called it something else."""

    kind: str
    rank: int
    incident: Incident | None
    detect: float | None
    recover: float | None
    lost_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """All of a soak. `good_seconds` are those of steps that survive, without what keeping the state took of them."""

    wall_seconds: float
    good_seconds: float
    steps: int
    blows: Sequence[Blow]
    false_blames: Sequence[Incident]
    unexpected: Sequence[Incident]

    @property
    def goodput(self) -> float:
        return self.good_seconds / self.wall_seconds

    @property
    def unclassified(self) -> int:
        return sum(blow.incident is None or blow.incident.cause == "unknown" for blow in self.blows)

    @property
    def passed(self) -> bool:
        return self.goodput >= LEAST_GOODPUT and not self.unclassified


def table(soak: Soak, *, about: str) -> str:
    """Return the report as Markdown."""
    rows = [_row(name, [blow for blow in soak.blows if blow.kind == name]) for name in _names(soak.blows)]
    rows.append(_row("all", soak.blows))
    faults = len(soak.blows)
    head = [
        f"{about}: {soak.wall_seconds / 60:.1f} minutes, {soak.steps} steps, {faults} faults, "
        f"one every {soak.wall_seconds / max(1, faults):.0f} s",
        "",
        f"**Goodput {soak.goodput:.1%}** (goal {LEAST_GOODPUT:.0%}); unclassified {soak.unclassified}; "
        f"false blames {len(soak.false_blames)}; incidents that the soak had not caused {len(soak.unexpected)}",
        "",
        "| fault | times | seconds to detect: median, worst | to the first new step: median, worst | lost steps |",
        "|---|---|---|---|---|",
    ]
    peers = ["", "| measured of others | detect | first new step | lost steps | |", "|---|---|---|---|---|"]
    extra = [
        f"- {each.id} {each.cause} {each.suspects}: {each.what}" for each in (*soak.false_blames, *soak.unexpected)
    ]
    return "\n".join([*head, *rows, *peers, *(f"| {' | '.join(peer)} |" for peer in PEERS), "", *extra])


def _names(blows: Sequence[Blow]) -> list[str]:
    return list(dict.fromkeys(blow.kind for blow in blows))


def _row(name: str, blows: Sequence[Blow]) -> str:
    detect = _spread([blow.detect for blow in blows])
    recover = _spread([blow.recover for blow in blows])
    lost = [blow.lost_steps for blow in blows if blow.lost_steps is not None]
    return f"| {name} | {len(blows)} | {detect} | {recover} | {sum(lost) if lost else '-'} |"


def _spread(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}, {max(known):.2f}" if known else "-"

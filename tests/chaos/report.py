"""The result of a soak as a table: goodput, detection, recovery and lost steps, beside other launchers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import Incident

MIN_GOODPUT = 0.90
PEERS = (
    ("torchrun, store fix: kill -9", "0.2", "4.0 to 6.8", "1 to 4", "6 of 6 resumed"),
    ("torchrun, defaults: kill -9", "0.2", "8.3, 14.8 or never", "1 to 4", "1 clean run of 4"),
    ("torchrun, 10 s timeout: SIGSTOP", "10", "45.8", "-", "no rank named"),
    ("NVRx 0.4.1: SIGSTOP", "10.0", "13.0", "-", "no rank named"),
    ("torchft nightly: kill -9, SIGSTOP", "5.0", "5.0 stall", "0", "of the surviving replica"),
)
"""Measured on the same machine with the same job: fault, seconds to detect, seconds to the first new step, lost steps,
remarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault and its result. Seconds and steps are None where they do not apply; `incident` is None if no incident
    with the expected cause was filed."""

    kind: str
    rank: int
    incident: Incident | None
    detect: float | None
    recover: float | None
    lost_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The result of a soak. `good_seconds` are those of steps that survived, without the time for checkpoints."""

    wall_seconds: float
    good_seconds: float
    steps: int
    faults: Sequence[InjectedFault]
    false_attributions: Sequence[Incident]
    unexpected: Sequence[Incident]

    @property
    def goodput(self) -> float:
        return self.good_seconds / self.wall_seconds

    @property
    def unclassified(self) -> int:
        return sum(fault.incident is None or fault.incident.cause == "unknown" for fault in self.faults)

    @property
    def passed(self) -> bool:
        return self.goodput >= MIN_GOODPUT and not self.unclassified


def table(soak: Soak, *, about: str) -> str:
    """Return the report as Markdown."""
    rows = [_row(name, [fault for fault in soak.faults if fault.kind == name]) for name in _names(soak.faults)]
    rows.append(_row("all", soak.faults))
    num_faults = len(soak.faults)
    head = [
        f"{about}: {soak.wall_seconds / 60:.1f} minutes, {soak.steps} steps, {num_faults} faults, "
        f"one every {soak.wall_seconds / max(1, num_faults):.0f} s",
        "",
        f"**Goodput {soak.goodput:.1%}** (goal {MIN_GOODPUT:.0%}); unclassified {soak.unclassified}; "
        f"false attributions {len(soak.false_attributions)}; unexpected incidents {len(soak.unexpected)}",
        "",
        "| fault | times | seconds to detect: median, worst | to the first new step: median, worst | lost steps |",
        "|---|---|---|---|---|",
    ]
    peers = ["", "| measured with other launchers | detect | first new step | lost steps | |", "|---|---|---|---|---|"]
    extra = [
        f"- {each.id} {each.cause} {each.suspects}: {each.what}"
        for each in (*soak.false_attributions, *soak.unexpected)
    ]
    return "\n".join([*head, *rows, *peers, *(f"| {' | '.join(peer)} |" for peer in PEERS), "", *extra])


def _names(faults: Sequence[InjectedFault]) -> list[str]:
    return list(dict.fromkeys(fault.kind for fault in faults))


def _row(name: str, faults: Sequence[InjectedFault]) -> str:
    detect = _spread([fault.detect for fault in faults])
    recover = _spread([fault.recover for fault in faults])
    lost = [fault.lost_steps for fault in faults if fault.lost_steps is not None]
    return f"| {name} | {len(faults)} | {detect} | {recover} | {sum(lost) if lost else '-'} |"


def _spread(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}, {max(known):.2f}" if known else "-"

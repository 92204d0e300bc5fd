"""The result of a soak as a table: goodput, detection, recovery and lost steps, beside other launchers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.core import Incident

MIN_GOODPUT = 0.90
LONGEST_STEP = 5.0  # median steps
MARKS = ("<!-- soak -->", "<!-- end of soak -->")  # in the guide, around the table
MAX_LINE = 118
LOST_CATEGORIES = ("save", "evaluation", "compile", "init", "restart", "replay", "idle")
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
    with the expected cause was filed. `names_rank`: the incident should name the rank."""

    kind: str
    rank: int
    names_rank: bool
    incident: Incident | None
    detect: float | None
    recover: float | None
    lost_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The result of a soak. `good_seconds` are those of steps that survived, without the time for checkpoints.

    `ledger` has the seconds since the launch by category, see `docs/guides/goodput.md`.
    """

    wall_seconds: float
    good_seconds: float
    steps: int
    faults: Sequence[InjectedFault]
    false_attributions: Sequence[Incident]
    unexpected: Sequence[Incident]
    ledger: Mapping[str, float]

    @property
    def goodput(self) -> float:
        return self.good_seconds / self.wall_seconds

    @property
    def unclassified(self) -> int:
        return sum(fault.incident is None or fault.incident.cause == "unknown" for fault in self.faults)

    @property
    def unnamed(self) -> int:
        """How many faults of a rank have an incident that does not name the rank."""
        named = (
            fault.incident.suspects == (fault.rank,) for fault in self.faults if fault.incident and fault.names_rank
        )
        return sum(not each for each in named)

    @property
    def passed(self) -> bool:
        wrong = self.unclassified or self.unnamed or self.false_attributions
        return self.goodput >= MIN_GOODPUT and not wrong


def good_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of the steps in `metrics` whose update was applied, without the time for checkpoints.

    A step counts for at most some median steps: the step in which a rank is stopped may still be finished, once the
    rank is continued to write its stacks.
    """
    seconds = [each["step_seconds"] - each["phases"]["checkpoint"] for each in metrics if not each.get("skipped")]
    longest = LONGEST_STEP * statistics.median(seconds)
    return sum(min(each, longest) for each in seconds)


def table(soak: Soak, *, about: str, peers: bool = True) -> str:
    """Return the report as Markdown, with the measurements of other launchers if `peers`."""
    rows = [_row(name, [fault for fault in soak.faults if fault.kind == name]) for name in _names(soak.faults)]
    rows.append(_row("all", soak.faults))
    num_faults = len(soak.faults)
    head = [
        f"{about}: {soak.wall_seconds / 60:.1f} minutes, {soak.steps} steps, {num_faults} faults, "
        f"one every {soak.wall_seconds / max(1, num_faults):.0f} s",
        "",
        f"**Goodput {soak.goodput:.1%}** (goal {MIN_GOODPUT:.0%}); unclassified {soak.unclassified}; "
        f"not named {soak.unnamed}; false attributions {len(soak.false_attributions)}; "
        f"unexpected incidents {len(soak.unexpected)}",
        "",
        _lost_time(soak),
        "",
        "| fault | times | seconds to detect: median, worst | to the first new step: median, worst, sum | lost steps |",
        "|---|---|---|---|---|",
    ]
    others = ["", "| measured with other launchers | detect | first new step | lost steps | |", "|---|---|---|---|---|"]
    extra = [
        f"- {each.id} {each.cause} {each.suspects}: {each.what}"[:MAX_LINE]
        for each in (*soak.false_attributions, *soak.unexpected)
    ]
    others += [f"| {' | '.join(peer)} |" for peer in PEERS]
    return "\n".join([*head, *rows, *(others if peers else []), "", *extra]).rstrip()


def with_table(page: str, report: str) -> str:
    """Return a page of the documentation with `report` between its two marks."""
    before, _, rest = page.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    assert mark, f"the page has no {MARKS[0]} and {MARKS[1]}"
    return f"{before}{MARKS[0]}\n{report}\n{MARKS[1]}{after}"


def _lost_time(soak: Soak) -> str:
    """Return what the time outside of good steps was spent on, most first."""
    lost = {name: seconds for name, seconds in soak.ledger.items() if name in LOST_CATEGORIES and seconds >= 0.5}
    parts = [f"{name} {seconds:.1f} s" for name, seconds in sorted(lost.items(), key=lambda item: -item[1])]
    return f"Outside of steps, by the [ledger](goodput.md): {', '.join(parts)}"


def _names(faults: Sequence[InjectedFault]) -> list[str]:
    return list(dict.fromkeys(fault.kind for fault in faults))


def _row(name: str, faults: Sequence[InjectedFault]) -> str:
    detect = _spread([fault.detect for fault in faults])
    recover = _spread([fault.recover for fault in faults])
    lost = [fault.lost_steps for fault in faults if fault.lost_steps is not None]
    total = sum(fault.recover or 0.0 for fault in faults)
    spent = f"{recover}, {total:.1f}" if total else recover
    return f"| {name} | {len(faults)} | {detect} | {spent} | {sum(lost) if lost else '-'} |"


def _spread(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}, {max(known):.2f}" if known else "-"

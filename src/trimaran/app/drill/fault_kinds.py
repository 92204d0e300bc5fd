"""The faults that a drill can inject, and what a run is expected to do about each."""

import re
from dataclasses import dataclass
from typing import Literal

from trimaran.core import Cause, UserError
from trimaran.runs.run_requests import CHANGE_PHASES, ChangePhase

FaultName = Literal[
    "kill",
    "kill-in-change",
    "stop",
    "slow",
    "kill-loader",
    "kill-fork-server",
    "fill-disk",
    "cut",
    "terminate",
    "kill-supervisor",
    "damage-checkpoint",
]
SLOW = re.compile(r"(\d{1,6})=(\d{1,2}(?:\.\d{1,3})?)x?")
MIN_FACTOR, MAX_FACTOR = 1.5, 20.0  # of a slow rank: below, it is not a straggler; above, it looks hung
DEFAULT_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault. `causes` are those that its incident may have; empty: it leaves no incident.

    `names_rank`: the incident must name the rank. `lasts`: the fault is undone once it is detected. `restarts`: all
    ranks start again. `ends_run`: the supervisor ends too, and the run has to be resumed. `destroys`: it is injected
    only into runs that a drill has started.
    """

    name: FaultName
    what: str
    causes: tuple[Cause, ...] = ()
    names_rank: bool = False
    lasts: bool = False
    restarts: bool = False
    ends_run: bool = False
    destroys: bool = False


KINDS: dict[FaultName, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind(name="kill", what="SIGKILL to a rank", causes=("crash",), names_rank=True, restarts=True),
        FaultKind(
            name="kill-in-change",
            what="SIGKILL to a rank while the plan changes",
            causes=("crash",),
            names_rank=True,
            restarts=True,
        ),
        FaultKind(name="stop", what="SIGSTOP to a rank", causes=("hang",), names_rank=True, restarts=True),
        FaultKind(name="slow", what="a rank runs slower", causes=("straggler",), names_rank=True, lasts=True),
        FaultKind(name="kill-loader", what="SIGKILL to a loader process of a rank"),
        FaultKind(name="kill-fork-server", what="SIGKILL to the fork server", causes=("host",), restarts=True),
        FaultKind(name="fill-disk", what="the disk of the run directory is full", causes=("storage",), lasts=True),
        FaultKind(
            name="cut", what="no network to the other nodes", causes=("network", "host"), lasts=True, restarts=True
        ),
        FaultKind(name="terminate", what="SIGTERM to the supervisor", causes=("preempted",), ends_run=True),
        FaultKind(name="kill-supervisor", what="SIGKILL to the supervisor", causes=("host",), ends_run=True),
        FaultKind(
            name="damage-checkpoint",
            what="a flipped bit in the newest checkpoint, SIGKILL to the supervisor",
            causes=("storage",),
            ends_run=True,
            destroys=True,
        ),
    )
}  # in the order in which they are injected: those that end the run come last


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFault:
    """One fault to inject: into `rank`, or at `node` for a cut network.

    `factor` is that of a slow rank, and `phase` where in a change of the plan a rank is killed.
    """

    kind: FaultKind
    rank: int | None = None
    factor: float = DEFAULT_FACTOR
    node: str = ""
    phase: ChangePhase = "hand-over"

    @property
    def title(self) -> str:
        """Return the fault as its option is typed, such as `slow 1=2x`."""
        target = self.node if self.kind.name == "cut" else "" if self.rank is None else str(self.rank)
        detail = {"slow": f"={self.factor:g}x", "kill-in-change": f"={self.phase}"}.get(self.kind.name, "")
        return f"{self.kind.name} {target}{detail}".strip()


def parse_slow(text: str) -> DrillFault:
    """Return the fault of `--slow 1=2x`: rank 1 runs at half its speed."""
    match = SLOW.fullmatch(text)
    if match is None or not MIN_FACTOR <= float(match[2]) <= MAX_FACTOR:
        raise UserError(
            "A001",
            f"'{text}' is not RANK=FACTORx with a factor of {MIN_FACTOR:g} to {MAX_FACTOR:g}",
            where="--slow",
            fix="write --slow 1=2x for half the speed of rank 1",
        )
    return DrillFault(kind=KINDS["slow"], rank=int(match[1]), factor=float(match[2]))


def parse_kill_in_change(text: str) -> DrillFault:
    """Return the fault of `--kill-in-change 1=hand-over`: rank 1 dies while it hands its state to another plan."""
    rank, _, name = text.partition("=")
    phase = next((each for each in CHANGE_PHASES if each == name), None)
    if phase is None or not re.fullmatch(r"[0-9]{1,6}", rank):
        raise UserError("A001", f"'{text}' is not RANK=PHASE", where="--kill-in-change",
                        fix=f"write 1=hand-over; the phases are {', '.join(CHANGE_PHASES)}")  # fmt: skip
    return DrillFault(kind=KINDS["kill-in-change"], rank=int(rank), phase=phase)

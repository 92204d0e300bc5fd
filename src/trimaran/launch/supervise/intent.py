"""The intent of a supervisor for the running ranks: a pure function of its last intent and new facts.

Every intent but `Continue` has the ranks stop with a checkpoint. It says what follows when they have.
"""

from dataclasses import dataclass

from trimaran.core import Cause


@dataclass(frozen=True, slots=True)
class Continue:
    """Let the ranks train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Start again with `size` ranks."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """Start again without these nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the run. `what` is a sentence without a full stop. `is_own`: only this supervisor was asked, by a signal."""

    cause: Cause
    what: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class HandOver:
    """End this supervisor only: another node coordinates the run from now on."""


Intent = Continue | Resize | LeaveOut | Stop | HandOver


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequests:
    """Who asks for the end of the run."""

    moved: str = ""  # where its directory was moved to
    signal: str = ""  # which one came
    stop_file: bool = False  # it exists; the supervisor itself writes it to have the ranks stop


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanges:
    """The nodes that leave the run, and the number of ranks that was requested or that more nodes allow."""

    leaving: tuple[str, ...] = ()
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllStopped:
    """All ranks stopped with a complete checkpoint."""

    leaving: tuple[str, ...] = ()  # the nodes that leave the run
    enough_stay: bool = False  # the other nodes are enough to continue
    can_hand_over: bool = False  # they are enough without this node too, and one of them can coordinate


@dataclass(frozen=True, slots=True)
class Restart:
    """The ranks are started again: they stopped for the last intent, or a fault ended them before they could."""


IntentFacts = StopRequests | NodeChanges | AllStopped | Restart


def next_intent(intent: Intent, facts: IntentFacts) -> Intent:
    """Return the intent from now on. Nothing takes back a `Stop` or a `HandOver`."""
    if isinstance(intent, HandOver):
        return intent
    if isinstance(intent, Stop):
        is_handed_over = intent.is_own and isinstance(facts, AllStopped) and facts.can_hand_over
        return HandOver() if is_handed_over else intent
    match facts:
        case StopRequests():
            if facts.moved:
                return Stop(cause="storage", what=facts.moved)
            is_asked_by_file = facts.stop_file and isinstance(intent, Continue)  # otherwise the file is ours
            if not facts.signal and not is_asked_by_file:
                return intent
            what = f"the run was asked to stop by {facts.signal or 'the stop file'}"
            return Stop(cause="preempted", what=what, is_own=not is_asked_by_file)
        case NodeChanges():
            if not isinstance(intent, Continue):
                return intent  # the ranks stop already; then the nodes are looked at again
            if facts.leaving:
                return LeaveOut(nodes=facts.leaving)
            return intent if facts.size is None else Resize(size=facts.size)
        case AllStopped():
            # Start again, or end the run. Without an intent of ours, someone else has asked the ranks to stop.
            if isinstance(intent, Resize):
                return intent
            if facts.leaving and facts.enough_stay:
                return LeaveOut(nodes=facts.leaving)
            who = ", ".join(facts.leaving) or "a rank"
            return Stop(cause="preempted", what=f"{who} was asked to stop, and all ranks stopped")
        case Restart():
            return Continue()

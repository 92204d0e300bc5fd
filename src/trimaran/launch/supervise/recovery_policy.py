"""What to do after a failed attempt: a pure function of the attempts so far and of what the recipe allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, Action, FaultsSection, Incident

EXIT_FAULT = 1
SAME_RANK_CYCLES = 2
UNWRITTEN_CHECKPOINT = "K043"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One attempt and the incident that ended it. `new_steps`: the steps that no earlier attempt had finished."""

    incident: Incident
    new_steps: int

    @property
    def progress(self) -> bool:
        """Whether the attempt brought the run forward: new steps, a bad sample found, or another plan."""
        return self.new_steps > 0 or self.incident.action in ("quarantined", "replanned", "resized")

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples that could not be loaded."""
        return tuple(self.incident.evidence.get("sample_ids", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """The changes that are still possible."""

    world_size: int  # the current one
    smaller: int | None = None  # the next smaller one that the recipe allows and a plan exists for
    less_memory: str | None = None  # describes the change to a plan that needs less memory, or to the allocator
    allocator: str = ""  # settings of the CUDA allocator for that
    quarantined: int = 0  # samples left out so far
    last_step: int | None = None  # of the run, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """What to do next. `code` is the exit code if that is `stopped`; `why` is a sentence without a full stop."""

    action: Action
    why: str
    code: int = 0
    world_size: int | None = None
    samples: tuple[int, ...] = ()
    allocator: str = ""


def decide(history: Sequence[Cycle], faults: FaultsSection, options: RecoveryOptions) -> PolicyDecision:
    """Return what to do about the last cycle of `history`."""
    last = history[-1]
    cause = last.incident.cause
    if cause == "user":
        return PolicyDecision(action="stopped", code=EXIT_USER, why="a restart does not fix a configuration error")
    if cause == "preempted":
        return PolicyDecision(action="stopped", code=EXIT_AGAIN, why="the run was asked to stop")
    if cause == "storage" and last.incident.evidence.get("code") == UNWRITTEN_CHECKPOINT:
        why = "there is no room for it; once there is, `trimaran resume` continues from the checkpoint before"
        return PolicyDecision(action="stopped", code=EXIT_AGAIN, why=why)
    if not faults.restart:
        return PolicyDecision(action="stopped", code=EXIT_FAULT, why="the recipe forbids restarts (faults.restart)")
    if cause == "numeric":
        return PolicyDecision(action="stopped", code=EXIT_STUCK, why="a restart would compute the same values again")
    if cause == "oom":
        if options.less_memory:
            return PolicyDecision(action="replanned", why=options.less_memory, allocator=options.allocator)
        # The same plan would run out of memory again.
        why = "no plan with less memory is left to try; use more devices, a smaller model or shorter sequences"
        return PolicyDecision(action="stopped", code=EXIT_STUCK, why=why)
    if cause == "data" and last.samples:
        if options.quarantined + len(last.samples) > faults.max_quarantined:
            why = f"more than {faults.max_quarantined} samples cannot be loaded (faults.max_quarantined)"
            return PolicyDecision(action="stopped", code=EXIT_STUCK, why=why)
        shown = ", ".join(map(str, last.samples[:4]))
        many = "samples" if len(last.samples) > 1 else "sample"
        return PolicyDecision(action="quarantined", why=f"{many} {shown} will be left out", samples=last.samples)
    # The last cycles in a row without progress, the latest first.
    stuck = [*takewhile(lambda cycle: not cycle.progress, reversed(history))]
    same = _same_rank(stuck)
    if same is not None and len(stuck) >= min(SAME_RANK_CYCLES, faults.cycles) and options.smaller:
        failed = f"rank {same} failed {len(stuck)} times in a row without a new step"
        why = f"{failed}; continuing with {options.smaller} ranks"
        return PolicyDecision(action="resized", why=why, world_size=options.smaller)
    if len(stuck) >= faults.cycles:
        why = f"no new step in {len(stuck)} starts; {_suspicion(stuck, options.last_step)}"
        return PolicyDecision(action="stopped", code=EXIT_STUCK, why=why)
    return PolicyDecision(action="restarted", why="from the newest state")


def _same_rank(cycles: Sequence[Cycle]) -> int | None:
    """Return the one rank that was at fault in every one of `cycles`; None if there is none."""
    suspects = {cycle.incident.suspects for cycle in cycles}
    (only,) = suspects if len(suspects) == 1 else ((),)
    return only[0] if len(only) == 1 else None


def _suspicion(cycles: Sequence[Cycle], last_step: int | None) -> str:
    steps = {cycle.incident.step for cycle in cycles}
    causes = {cycle.incident.cause for cycle in cycles}
    rank, parts = _same_rank(cycles), []
    if len(steps) == 1 and last_step is not None and max(steps) >= last_step:
        parts.append(f"always after step {last_step}, the last one: suspect the disk that its state is saved to")
    elif len(steps) == 1 and (step := steps.pop()):
        parts.append(f"always after step {step}: suspect the data of step {step + 1}, or the code")
    elif steps == {0} or not steps:
        parts.append("it never reached the first step: suspect the code or the machine")
    if rank is not None:
        parts.append(f"always rank {rank}")
    if len(causes) == 1:
        parts.append(f"always {causes.pop()}")
    return ", ".join(parts) or "a different rank and step each time: suspect the machine"

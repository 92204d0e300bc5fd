"""What to do about trouble: a pure function of what went wrong so far and of what the recipe allows."""

from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.core import EXIT_AGAIN, EXIT_STUCK, EXIT_USER, Action, FaultsSection, Incident

EXIT_FAULT = 1
SAME_RANK_CYCLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One start of the ranks and the trouble that ended it. `new_steps`: how many no earlier one had got to."""

    incident: Incident
    new_steps: int

    @property
    def progress(self) -> bool:
        """Whether it would be wrong to call this standing still: new steps, or a bad sample that was found."""
        return self.new_steps > 0 or self.incident.action in ("quarantined", "replanned", "resized")

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples that could not be loaded."""
        return tuple(self.incident.evidence.get("sample_ids", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What the run has left to answer with: `world_size` now, the next `smaller` one that the recipe allows and a plan
    exists for, a `leaner` plan, how many samples are `quarantined`."""

    world_size: int
    smaller: int | None = None
    leaner: str | None = None
    quarantined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """What is done next. `code` is the exit code where that is `stopped`; `why` is a sentence without a full stop."""

    action: Action
    why: str
    code: int = 0
    world_size: int | None = None
    samples: tuple[int, ...] = ()


def decide(history: Sequence[Cycle], faults: FaultsSection, means: Means) -> PolicyDecision:
    """Return what to do about the last cycle of `history`."""
    last = history[-1]
    cause = last.incident.cause
    if cause == "user":
        return PolicyDecision(action="stopped", code=EXIT_USER, why="a person's mistake is not mended by a restart")
    if cause == "preempted":
        return PolicyDecision(action="stopped", code=EXIT_AGAIN, why="somebody asked the run to end")
    if not faults.restart:
        return PolicyDecision(action="stopped", code=EXIT_FAULT, why="the recipe wants no restarts (faults.restart)")
    if cause == "numeric":
        return PolicyDecision(action="stopped", code=EXIT_STUCK, why="the same numbers would come again")
    if cause == "oom":
        return _about_memory(means)
    if cause == "data" and last.samples:
        return _about_samples(last, faults, means)
    return _about_the_rest(history, faults, means)


def _about_memory(means: Means) -> PolicyDecision:
    """Never the same again: what did not fit will not fit."""
    if means.leaner:
        return PolicyDecision(action="replanned", why=means.leaner)
    return PolicyDecision(action="stopped", code=EXIT_STUCK, why="no leaner plan is left to try; use more devices, a smaller "
                  "model or shorter sequences")  # fmt: skip


def _about_samples(last: Cycle, faults: FaultsSection, means: Means) -> PolicyDecision:
    if means.quarantined + len(last.samples) > faults.max_quarantined:
        why = f"more than {faults.max_quarantined} samples cannot be loaded (faults.max_quarantined)"
        return PolicyDecision(action="stopped", code=EXIT_STUCK, why=why)
    shown = ", ".join(map(str, last.samples[:4]))
    many = "samples" if len(last.samples) > 1 else "sample"
    return PolicyDecision(action="quarantined", why=f"{many} {shown} will be left out", samples=last.samples)


def _about_the_rest(history: Sequence[Cycle], faults: FaultsSection, means: Means) -> PolicyDecision:
    stuck = _standstill(history)
    same = _same_rank(stuck)
    if same is not None and len(stuck) >= min(SAME_RANK_CYCLES, faults.cycles) and means.smaller:
        why = f"rank {same} failed {len(stuck)} times in a row without a new step; going on with {means.smaller} ranks"
        return PolicyDecision(action="resized", why=why, world_size=means.smaller)
    if len(stuck) >= faults.cycles:
        return PolicyDecision(
            action="stopped", code=EXIT_STUCK, why=f"no new step in {len(stuck)} starts; {_suspicion(stuck)}"
        )
    return PolicyDecision(action="restarted", why="from the newest state")


def _standstill(history: Sequence[Cycle]) -> list[Cycle]:
    """Return the last cycles in a row that brought nothing new."""
    stuck: list[Cycle] = []
    for cycle in reversed(history):
        if cycle.progress:
            break
        stuck.insert(0, cycle)
    return stuck


def _same_rank(cycles: Sequence[Cycle]) -> int | None:
    """Return the one rank that was to blame in every one of `cycles`."""
    suspects = {cycle.incident.suspects for cycle in cycles}
    (only,) = suspects if len(suspects) == 1 else ((),)
    return only[0] if len(only) == 1 else None


def _suspicion(cycles: Sequence[Cycle]) -> str:
    """Return who or what is to blame for a run that does not get on."""
    steps = {cycle.incident.step for cycle in cycles}
    causes = {cycle.incident.cause for cycle in cycles}
    rank, words = _same_rank(cycles), []
    if len(steps) == 1 and (step := steps.pop()):
        words.append(f"always after step {step}: suspect the data of step {step + 1}, or the code")
    elif steps == {0} or not steps:
        words.append("it never got to the first step: suspect the code or the machine")
    if rank is not None:
        words.append(f"always rank {rank}")
    if len(causes) == 1:
        words.append(f"always {causes.pop()}")
    return ", ".join(words) or "a different rank and step each time: suspect the machine"

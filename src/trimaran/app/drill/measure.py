"""From what was observed of a run after a fault to the result of the drill. Pure functions.

Times are seconds since the fault was injected, by the clock of the machine of the drill.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trimaran.app.drill.inject import DrillFault
from trimaran.core import EXIT_AGAIN, Incident

LOADER_REPLACED = "loader worker "  # how a rank logs that it replaced a loader process, see `data/worker_pool.py`
STEPS_AFTER = 3  # new steps after a fault that restarts nothing, until the run counts as recovered


@dataclass(slots=True, kw_only=True)
class Observed:
    """What a run has written since a fault: each entry with its seconds.

    `step_before` is the highest step with metrics before the fault. `steps` are steps with metrics, `starts` the steps
    that later attempts started from. `incidents` has every line of every new incident. `undone` is when a lasting fault
    was undone, `gone` when the last process of the run ended, and `exit_code` what the supervisor wrote at its end.
    """

    step_before: int
    steps: list[tuple[float, int]] = field(default_factory=list)
    starts: list[tuple[float, int]] = field(default_factory=list)
    incidents: list[tuple[float, Incident]] = field(default_factory=list)
    log_lines: list[tuple[float, str]] = field(default_factory=list)
    undone: float | None = None
    gone: float | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """The result of one drill; a line of `drills.jsonl`. Seconds and steps are None if unknown, or if none apply.

    `fault` is its title, `time` when it was injected, in seconds since the epoch. `named`: the incident has an expected
    cause and names exactly the rank of the fault, if it has one. `note` says what is missing, or what to do next.
    """

    fault: str
    kind: str
    time: float
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    lost_steps: int | None = None
    incident: str | None = None
    cause: str | None = None
    suspects: tuple[int, ...] = ()
    named: bool = False
    passed: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_incident(fault: DrillFault, lines: Sequence[tuple[float, Incident]]) -> tuple[float, Incident] | None:
    """Return the incident of `fault` as it was last written, and when its cause and ranks were known; None if none.

    It is the first with an expected cause and rank; else the first other one, which was then wrongly attributed. Slow
    ranks that are found by the way do not count.
    """
    newest = {incident.id: incident for _, incident in lines}
    candidates = [each for each in newest.values() if each.cause != "straggler" or "straggler" in fault.kind.causes]
    candidates.sort(key=lambda each: not is_named(fault, each))
    if not candidates or not fault.kind.causes:
        return None
    found = candidates[0]
    known = (found.cause, found.suspects)
    return next((at, found) for at, each in lines if each.id == found.id and (each.cause, each.suspects) == known)


def is_named(fault: DrillFault, incident: Incident) -> bool:
    """Return whether the incident has an expected cause, and names the rank of the fault and no other."""
    names_rank = not fault.kind.names_rank or incident.suspects == (fault.rank,)
    return incident.cause in fault.kind.causes and names_rank


def detected_at(fault: DrillFault, seen: Observed) -> float | None:
    """Return when the run had noticed the fault; None if it has not."""
    if not fault.kind.causes:
        return next((at for at, line in seen.log_lines if LOADER_REPLACED in line), None)
    found = find_incident(fault, seen.incidents)
    return found[0] if found else None


def highest_step_before_restart(fault: DrillFault, seen: Observed) -> int:
    """Return the highest step that was finished before the ranks were started again."""
    restarted = min((at for at, _ in seen.starts), default=float("inf"))
    steps = [step for at, step in seen.steps if at < restarted]
    found = find_incident(fault, seen.incidents)
    known = found[1].step if found and fault.kind.restarts else 0
    return max([seen.step_before, known, *steps])


def recovered_at(fault: DrillFault, seen: Observed) -> float | None:
    """Return when the run finished a step that it had never finished before; None if it has not yet.

    After a fault that restarts nothing, it is some steps after the fault was noticed and undone.
    """
    if fault.kind.restarts or fault.kind.ends_run:
        if not seen.starts:
            return None
        floor, since = highest_step_before_restart(fault, seen), seen.starts[0][0]
        return next((at for at, step in seen.steps if at >= since and step > floor), None)
    noticed = detected_at(fault, seen)
    since = max(noticed or 0.0, seen.undone or 0.0)
    if noticed is None or (fault.kind.lasts and seen.undone is None):
        return None
    new = [at for at, _ in _new_steps(seen) if at >= since]
    return new[STEPS_AFTER - 1] if len(new) >= STEPS_AFTER else None


def is_complete(fault: DrillFault, seen: Observed, *, can_resume: bool) -> bool:
    """Return whether nothing more is to be observed. `can_resume`: the drill starts a run again that has ended."""
    if fault.kind.ends_run and not can_resume:
        return seen.gone is not None
    if detected_at(fault, seen) is None or recovered_at(fault, seen) is None:
        return False
    found = find_incident(fault, seen.incidents)
    return found is None or found[1].action is not None


def judge(fault: DrillFault, seen: Observed, *, time: float, can_resume: bool, within: float) -> DrillResult:
    """Return the result of a drill that is over, because it is complete or its time is up."""
    found = find_incident(fault, seen.incidents)
    incident = found[1] if found else None
    detected, recovered = detected_at(fault, seen), recovered_at(fault, seen)
    named = is_named(fault, incident) if incident else detected is not None
    needs_resume = fault.kind.ends_run and not can_resume
    if needs_resume and fault.kind.name == "terminate":
        passed = named and seen.exit_code == EXIT_AGAIN and seen.gone is not None
    elif needs_resume:
        passed = seen.gone is not None  # no process is left that could name a killed supervisor: the next start does
    else:
        in_time = all(each is not None and each <= within for each in (detected, recovered))
        passed = named and in_time and not _restarted_needlessly(fault, seen)
    if seen.starts:
        lost = max(0, highest_step_before_restart(fault, seen) - seen.starts[0][1])
    else:  # unknown if the ranks should have been started again
        lost = None if fault.kind.restarts or fault.kind.ends_run else 0
    return DrillResult(
        fault=fault.title,
        kind=fault.kind.name,
        time=time,
        detected_seconds=_rounded(detected),
        recovered_seconds=None if needs_resume else _rounded(recovered),
        lost_steps=lost,
        incident=incident.id if incident else None,
        cause=incident.cause if incident else None,
        suspects=incident.suspects if incident else (),
        named=named,
        passed=passed,
        note=_note(fault, seen, incident, needs_resume=needs_resume, within=within),
    )


def _restarted_needlessly(fault: DrillFault, seen: Observed) -> bool:
    return bool(seen.starts) and not (fault.kind.restarts or fault.kind.ends_run)


def _note(fault: DrillFault, seen: Observed, incident: Incident | None, *, needs_resume: bool, within: float) -> str:
    if needs_resume and seen.gone is not None:
        code = f" with exit code {seen.exit_code}" if seen.exit_code is not None else ""
        return f"all processes ended after {seen.gone:.1f} s{code}; `trimaran resume` continues the run"
    if _restarted_needlessly(fault, seen):
        return "the ranks were started again, which this fault does not need"
    if detected_at(fault, seen) is None:
        return f"not noticed within {within:.0f} s"
    if incident is not None and not is_named(fault, incident):
        ranks = f" of rank {', '.join(map(str, incident.suspects))}" if incident.suspects else ""
        return f"wrongly attributed: {incident.cause}{ranks}: {incident.what}"
    return "" if recovered_at(fault, seen) is not None else f"no new step within {within:.0f} s"


def _new_steps(seen: Observed) -> list[tuple[float, int]]:
    """Return the steps that had no metrics before, each once."""
    highest, new = seen.step_before, []
    for at, step in seen.steps:
        if step > highest:
            highest = step
            new.append((at, step))
    return new


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

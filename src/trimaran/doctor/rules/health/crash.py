"""F065: a process died."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incidents_of, rank_names, severity_of, times

# What the words of an incident mean, and what a person does about it. The first that fits counts.
FIXES = (
    ("SIGKILL", "nothing in a program sends this: look at the kernel's log, the batch system and who else is there"),
    ("SIGSEGV", "native code did it: look for a package that was built for another torch or driver"),
    ("SIGABRT", "native code gave up: the last lines of the rank's log say why"),
    ("SIGBUS", "memory that is a file was cut short, often /dev/shm: look at its size with `trimaran doctor`"),
    ("unused", "a parameter gets no gradient: use it in forward, or set requires_grad to False"),
    ("exit code 0", "something in the rank called exit: look for sys.exit or os._exit"),
)


def crash(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when a rank died of a signal, an exception, or left early."""
    incidents = incidents_of(evidence, "crash", "exit", "unknown")
    if not incidents:
        return
    last = incidents[-1]
    what, suspects = str(last.get("what") or ""), last.get("suspects") or ()
    log = f"logs/rank-{suspects[0] if suspects else 0}.log"
    fix = next((fix for word, fix in FIXES if word in what), f"the traceback is in {log}")
    cost = last.get("cost") or {}
    yield Finding(
        code="F065",
        severity=severity_of(incidents),
        verdict=f"a rank died {times(len(incidents), 'time')}, the last after step {last.get('step')}: {what}"
        + (f"; {times(round(cost['lost_steps']), 'step')} done again" if cost.get("lost_steps") else ""),
        culprit=rank_names(suspects),
        evidence={"incident": last.get("id"), "cost": cost, "count": len(incidents), "log": log},
        fix=fix,
        confidence=0.8,
        step=int(last.get("step") or 0),
    )

"""F065: a process died."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import incident_severity, incidents_of, plural, rank_names

EXIT_CALLED = "something in the rank called exit: look for sys.exit or os._exit"
NO_PROCESSES = "no more processes and threads are allowed: raise pids.max of the container, or `ulimit -u`"
# (text in the incident's message, fix); the first match counts.
FIXES = (
    ("SIGKILL", "another process sent it: check the kernel log (OOM killer), the batch system and other users"),
    ("SIGSEGV", "native code crashed: look for a package that was built for another torch or driver"),
    ("SIGABRT", "native code aborted: the last lines of the rank's log say why"),
    ("SIGBUS", "a memory-mapped file was truncated, often /dev/shm: check its size with `trimaran doctor`"),
    ("can't start new thread", NO_PROCESSES),
    ("Resource temporarily unavailable", NO_PROCESSES),
    ("unused", "a parameter gets no gradient: use it in forward, or set requires_grad to False"),
    ("exited with code 0", EXIT_CALLED),
    ("exit code 0", EXIT_CALLED),  # the message of earlier versions
)


def crash(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a rank died from a signal or an exception, or exited early."""
    incidents = incidents_of(evidence, "crash", "exit", "unknown")
    if not incidents:
        return
    last = incidents[-1]
    what, suspects = str(last.get("what") or ""), last.get("suspects") or ()
    log = f"logs/rank-{suspects[0] if suspects else 0}.log"
    fix = next((fix for text, fix in FIXES if text in what), f"read the traceback in {log}")
    cost = last.get("cost") or {}
    yield Finding(
        code="F065",
        severity=incident_severity(incidents),
        verdict=f"a rank died {plural(len(incidents), 'time')}, the last time after step {last.get('step')}: {what}"
        + (f"; {plural(round(cost['lost_steps']), 'step')} repeated" if cost.get("lost_steps") else ""),
        culprit=rank_names(suspects),
        evidence={"incident": last.get("id"), "cost": cost, "count": len(incidents), "log": log},
        fix=fix,
        confidence=0.8,
        step=int(last.get("step") or 0),
    )

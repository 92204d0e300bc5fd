"""Rules about incidents: ranks that hang, die, call different collectives or lose their connection."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import ended_run, incident_finding, incidents_of, plural, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch


def hang(evidence: Evidence) -> Iterator[Finding]:
    """Yield F063 if the run hung: which rank, where in the code, and which ranks only waited for it."""
    incidents = incidents_of(evidence, "hang")
    if not incidents:
        return
    last = incidents[-1]
    files = [str(each) for each in (last.get("evidence") or {}).get("files", ())]
    facts = _facts(last)
    effect, confidence = "", 0.9 if last.get("suspects") else 0.5
    # Whether the run later got past what it was doing then: a new step, or its end with exit code 0.
    over = [each["over"] for each in evidence.attempts if "over" in each]
    later = any(each.get("attempt", 0) > last.get("attempt", 0) for each in evidence.events_of_kind("done"))
    was_passed = evidence.last_step > int(last.get("step") or 0) or later or over[-1:] == [0]
    if not ended_run(last) and not was_passed:
        effect = "the run has not got past this point yet, and may hang there again until this is fixed"
    elif not ended_run(last) and len(incidents) > 1:
        effect, confidence = "the run later got past this point, but it hung more than once", 0.5
    elif not ended_run(last):
        effect = "the run later got past this point: the cause may have been the machine, and need not come back"
        confidence = 0.3
    yield incident_finding(
        "F063",
        incidents,
        f"the run hung {plural(len(incidents), 'time')}, the last time after step {last.get('step')}: "
        f"{last.get('what')}" + (f"; {facts[0]}" if facts else ""),
        evidence={"facts": facts[:4], "victims": list(last.get("victims") or ()), "cost": last.get("cost") or {}},
        fix=f"read the stack in incidents/{last.get('id')}/{files[0] if files else ''}: it shows where that rank waits",
        expected_effect=effect,
        confidence=confidence,
    )


def _facts(incident: Line) -> list[str]:
    return [str(each) for each in (incident.get("evidence") or {}).get("facts", ())]


def mismatch(evidence: Evidence) -> Iterator[Finding]:
    """Yield F064 if ranks called different collectives, with the line of each call."""
    incidents = incidents_of(evidence, "mismatch")
    if not incidents:
        return
    last = incidents[-1]
    sites = (last.get("evidence") or {}).get("sites") or {}
    # Earlier versions wrote "stands at".
    lines = [
        sites[str(rank)].removeprefix("stands at ").removeprefix("is at ")
        for rank in last.get("suspects") or ()
        if str(rank) in sites
    ]
    yield incident_finding(
        "F064",
        incidents,
        f"{last.get('what')}, after step {last.get('step')}",
        evidence={"sites": sites, "facts": _facts(last)[:4]},
        fix="make every rank call the same collectives in the same order: look for an `if` on the rank or its data "
        + (f"around {lines[0]}" if lines else "around the collective"),
        confidence=0.9,
    )


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
    """Yield F065 if a rank died from a signal or an exception, or exited early."""
    incidents = incidents_of(evidence, "crash", "exit", "unknown")
    if not incidents:
        return
    last = incidents[-1]
    what, suspects = str(last.get("what") or ""), last.get("suspects") or ()
    log = f"logs/rank-{suspects[0] if suspects else 0}.log"
    fix = next((fix for text, fix in FIXES if text in what), f"read the traceback in {log}")
    cost = last.get("cost") or {}
    yield incident_finding(
        "F065",
        incidents,
        f"a rank died {plural(len(incidents), 'time')}, the last time after step {last.get('step')}: {what}"
        + (f"; {plural(round(cost['lost_steps']), 'step')} repeated" if cost.get("lost_steps") else ""),
        evidence={"cost": cost, "log": log},
        fix=fix,
        confidence=0.8,
    )


MIN_STUCK_ATTEMPTS = 2  # in a row without a new step
FATAL_CAUSES = ("crash", "exit", "hang", "mismatch", "oom", "network", "storage", "data", "host", "unknown")


def no_progress(evidence: Evidence) -> Iterator[Finding]:
    """Yield F066 if the last attempts failed without reaching a new step."""
    # The last attempts in a row that failed at or before the last step of the attempt before them.
    ended = [each for each in evidence.attempts if "ended" in each]
    before = [0, *(int(each.get("step") or 0) for each in ended)]
    stuck: list[Line] = []
    for attempt, reached in zip(reversed(ended), reversed(before[:-1]), strict=True):
        if attempt.get("how") != "trouble" or int(attempt.get("step") or 0) > reached:
            break
        stuck.insert(0, attempt)
    if len(stuck) < MIN_STUCK_ATTEMPTS:
        return
    incidents = incidents_of(evidence, *FATAL_CAUSES)[-len(stuck) :]
    why = next((str(each.get("why") or "") for each in reversed(evidence.attempts) if "over" in each), "")
    suspects = {tuple(each.get("suspects") or ()) for each in incidents}
    always = suspects.pop() if len(suspects) == 1 else ()
    causes = {str(each.get("cause")) for each in incidents}
    world, step, steps = evidence.plan.mesh.world_size, int(stuck[-1]["step"]), evidence.recipe.train.steps
    next_step = f"step {step + 1}" if step < steps else f"the save after step {step}"
    patch: Patch = {}
    if len(always) == 1 and world > 1 and evidence.recipe.faults.ranks is None:  # continue without the rank that fails
        patch = valid_patch(evidence.recipe, {"faults.ranks": [max(1, world // 2), world]})
    yield Finding(
        code="F066",
        severity="fault",
        verdict=f"the last {len(stuck)} attempts made no progress: all ended at step {stuck[-1]['step']}"
        + (f", always {causes.pop()}" if len(causes) == 1 else "")
        + (f" of {rank_names(always)}" if always else ""),
        culprit=rank_names(always) or next_step,
        evidence={"starts": [each.get("attempt") for each in stuck], "why": why},
        patch=patch,
        fix=f"fix what happens each time: {incidents[-1].get('what') if incidents else why}",
        expected_effect="the run may continue with fewer ranks" if patch else "",
        confidence=0.9,
        step=step,
    )


def network(evidence: Evidence) -> Iterator[Finding]:
    """Yield F067 if a connection or a node was lost; not if the run only noted a slow link or a clock skew."""
    incidents = [each for each in incidents_of(evidence, "network", "host") if each.get("action") != "continued"]
    if not incidents:
        return
    last = incidents[-1]
    named = (last.get("evidence") or {}).get("nodes")
    yield incident_finding(
        "F067",
        incidents,
        f"ranks lost their connection {plural(len(incidents), 'time')}, the last time after step "
        f"{last.get('step')}: {last.get('what')}",
        culprit=str(named or rank_names(last.get("suspects") or ()) or "the network between the ranks"),
        evidence={"facts": _facts(last)[:4], "cost": last.get("cost") or {}},
        fix="run `trimaran doctor` on these nodes: it measures every pair and names the node that is slow or silent",
        confidence=0.7,
    )

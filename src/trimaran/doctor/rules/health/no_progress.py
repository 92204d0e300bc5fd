"""F066: restarts bring no progress."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incidents_of, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch

MIN_STUCK_ATTEMPTS = 2  # in a row without a new step
FATAL_CAUSES = ("crash", "exit", "hang", "mismatch", "oom", "network", "storage", "data", "host", "unknown")


def no_progress(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the last attempts failed without reaching a new step."""
    stuck = _stuck(evidence)
    if len(stuck) < MIN_STUCK_ATTEMPTS:
        return
    incidents = incidents_of(evidence, *FATAL_CAUSES)[-len(stuck) :]
    why = next((str(each.get("why") or "") for each in reversed(evidence.attempts) if "over" in each), "")
    suspects = {tuple(each.get("suspects") or ()) for each in incidents}
    always = suspects.pop() if len(suspects) == 1 else ()
    causes = {str(each.get("cause")) for each in incidents}
    patch = valid_patch(evidence.recipe, _patch(evidence, always))
    yield Finding(
        code="F066",
        severity="fault",
        verdict=f"the last {len(stuck)} attempts made no progress: all ended at step {stuck[-1]['step']}"
        + (f", always {causes.pop()}" if len(causes) == 1 else "")
        + (f" of {rank_names(always)}" if always else ""),
        culprit=rank_names(always) or _next_step(evidence, int(stuck[-1]["step"])),
        evidence={"starts": [each.get("attempt") for each in stuck], "why": why},
        patch=patch,
        fix=f"fix what happens each time: {incidents[-1].get('what') if incidents else why}",
        expected_effect="the run may continue with fewer ranks" if patch else "",
        confidence=0.9,
        step=int(stuck[-1]["step"]),
    )


def _stuck(evidence: Evidence) -> list[Line]:
    """Return the last attempts in a row that failed at or before the last step of the attempt before them."""
    ended = [each for each in evidence.attempts if "ended" in each]
    before = [0, *(int(each.get("step") or 0) for each in ended)]
    stuck: list[Line] = []
    for attempt, reached in zip(reversed(ended), reversed(before[:-1]), strict=True):
        if attempt.get("how") != "trouble" or int(attempt.get("step") or 0) > reached:
            break
        stuck.insert(0, attempt)
    return stuck


def _next_step(evidence: Evidence, step: int) -> str:
    """Return the name of the step after `step`, or of what follows the last one."""
    return f"step {step + 1}" if step < evidence.recipe.train.steps else f"the save after step {step}"


def _patch(evidence: Evidence, always: tuple[int, ...]) -> Patch:
    """Return the patch that lets the run continue without the one rank that always fails."""
    world = evidence.plan.mesh.world_size
    if len(always) != 1 or world < 2 or evidence.recipe.faults.ranks is not None:
        return {}
    return {"faults.ranks": [max(1, world // 2), world]}

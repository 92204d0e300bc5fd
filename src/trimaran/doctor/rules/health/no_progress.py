"""F066: the run is started again and again and gets no further."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import incidents_of, rank_names, sound
from trimaran.doctor.predicted_gain import Patch

FEWEST = 2  # starts in a row without a new step
ANY = ("crash", "exit", "hang", "mismatch", "oom", "network", "storage", "data", "host", "unknown")


def no_progress(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the last starts ended in trouble where the ones before had been already."""
    stuck = _stuck(evidence)
    if len(stuck) < FEWEST:
        return
    incidents = incidents_of(evidence, *ANY)[-len(stuck) :]
    why = next((str(each.get("why") or "") for each in reversed(evidence.attempts) if "over" in each), "")
    suspects = {tuple(each.get("suspects") or ()) for each in incidents}
    always = suspects.pop() if len(suspects) == 1 else ()
    causes = {str(each.get("cause")) for each in incidents}
    patch = sound(evidence.recipe, _patch(evidence, always))
    yield Finding(
        code="F066",
        severity="fault",
        verdict=f"the last {len(stuck)} starts brought no new step: all ended at step {stuck[-1]['step']}"
        + (f", always {causes.pop()}" if len(causes) == 1 else "")
        + (f" of {rank_names(always)}" if always else ""),
        culprit=rank_names(always) or f"step {int(stuck[-1]['step']) + 1}",
        evidence={"starts": [each.get("attempt") for each in stuck], "why": why},
        patch=patch,
        fix=f"mend what comes back each time: {incidents[-1].get('what') if incidents else why}",
        expected_effect="the run may go on with one rank less" if patch else "",
        confidence=0.9,
        step=int(stuck[-1]["step"]),
    )


def _stuck(evidence: Evidence) -> list[Line]:
    """Return the last starts in a row that came no further than the one before them, or not to a step at all."""
    ended = [each for each in evidence.attempts if "ended" in each]
    before = [0, *(int(each.get("step") or 0) for each in ended)]
    stuck: list[Line] = []
    for start, known in zip(reversed(ended), reversed(before[:-1]), strict=True):
        if start.get("how") != "trouble" or int(start.get("step") or 0) > known:
            break
        stuck.insert(0, start)
    return stuck


def _patch(evidence: Evidence, always: tuple[int, ...]) -> Patch:
    """Return the patch that lets the run go on without the one rank that always fails."""
    world = evidence.plan.mesh.world_size
    if len(always) != 1 or world < 2 or evidence.recipe.faults.ranks is not None:
        return {}
    return {"faults.ranks": [max(1, world // 2), world]}

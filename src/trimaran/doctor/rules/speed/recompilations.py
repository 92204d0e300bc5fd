"""F008: torch.compile recompiles repeatedly."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding, show_seconds
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.step_breakdown import steady_steps

MIN_RECOMPILATIONS = 3  # after the warm-up: one or two may come from a last, smaller batch


def recompilations(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if torch compiles repeatedly after the first steps."""
    first = evidence.steps[0]["step"] if evidence.steps else 0
    late = [
        each for each in evidence.events_of_kind("recompile") if each.get("rank") == 0 and each.get("step", 0) >= first
    ]
    if len(late) < MIN_RECOMPILATIONS:
        return
    facts = [each.get("data") or {} for each in late]
    what, count = Counter(str(each.get("what")) for each in facts).most_common(1)[0]
    why = next(str(each.get("why")) for each in facts if str(each.get("what")) == what)
    at = {each.get("step") for each in late}
    steps = steady_steps(evidence)
    usual = median(each["step_seconds"] for each in steps) if steps else 0.0
    total = sum(each["step_seconds"] for each in steps)
    lost = sum(max(0.0, each["step_seconds"] - usual) for each in steps if each["step"] in at)
    shapes = "size" in why and evidence.recipe.data.samples.batching != "pack"
    patch: dict[str, object] = {"data.samples.batching": "pack"} if shapes else {"plan.compile": False}
    gain = lost / total if total else None
    yield Finding(
        code="F008",
        severity="warning",
        verdict=f"{len(late)} recompilations after the first steps, {count} of them of {what}; they took about "
        f"{show_seconds(lost)}",
        culprit=what,
        evidence={"recompilations": len(late), "why": why, "lost_seconds": lost, "steps": sorted(map(str, at))[:8]},
        patch=patch,
        fix="" if shapes else "or remove what changes from step to step: torch's reason is in the evidence",
        expected_effect=f"steps {gain:.0%} shorter on average" if gain else "",
        gain=gain,
        confidence=0.9,
    )

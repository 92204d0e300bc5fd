"""F055: parameters are trained that the loss does not depend on."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import rank_names, sound, times
from trimaran.doctor.predicted_gain import Patch

SHOWN = 8


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when parameters had no gradient after the first step of the newest start."""
    started = evidence.of_kind("started")
    newest = max((each.get("attempt", 0) for each in started), default=0)
    told = {each["rank"]: each["data"]["unused"] for each in started
            if each.get("attempt", 0) == newest and each["data"].get("unused")}  # fmt: skip
    names = sorted({name for unused in told.values() for name in unused})
    if not names:
        return
    patch = sound(evidence.recipe, _patch(evidence, names))
    yield Finding(
        code="F055",
        severity="warning",
        verdict=f"{times(len(names), 'parameter')} got no gradient: {', '.join(names[:3])}"
        f"{' and more' if len(names) > 3 else ''}; they take memory for gradients and states and never learn",
        culprit=names[0].rpartition(".")[0] or names[0],
        evidence={"parameters": names[:SHOWN], "count": len(names), "ranks": rank_names(sorted(told))},
        patch=patch,
        fix="" if patch else "use them in forward, take them out of the model, or set requires_grad to False",
        expected_effect="the same course, with less memory",
        confidence=0.95,
        step=1,
    )


def _patch(evidence: Evidence, names: list[str]) -> Patch:
    """Return the patch that freezes a tower of which nothing learns."""
    tower = names[0].partition(".")[0]
    if evidence.recipe.model.family != "vlm" or any(name.partition(".")[0] != tower for name in names):
        return {}
    return {"model.freeze": [*evidence.recipe.model.freeze, tower]}

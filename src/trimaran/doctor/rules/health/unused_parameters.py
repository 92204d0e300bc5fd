"""F055: trained parameters get no gradient."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import plural, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch

MAX_NAMES_SHOWN = 8


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if parameters had no gradient at the first step of the latest attempt."""
    started = evidence.events_of_kind("started")
    newest = max((each.get("attempt", 0) for each in started), default=0)
    by_rank = {each["rank"]: each["data"]["unused"] for each in started
               if each.get("attempt", 0) == newest and each["data"].get("unused")}  # fmt: skip
    names = sorted({name for unused in by_rank.values() for name in unused})
    if not names:
        return
    patch = valid_patch(evidence.recipe, _patch(evidence, names))
    yield Finding(
        code="F055",
        severity="warning",
        verdict=f"{plural(len(names), 'parameter')} got no gradient: {', '.join(names[:3])}"
        f"{' and more' if len(names) > 3 else ''}; they take memory for gradients and optimizer states and never learn",
        culprit=names[0].rpartition(".")[0] or names[0],
        evidence={"parameters": names[:MAX_NAMES_SHOWN], "count": len(names), "ranks": rank_names(sorted(by_rank))},
        patch=patch,
        fix="" if patch else "use them in forward, remove them from the model, or set requires_grad to False",
        expected_effect="the same loss curve, with less memory",
        confidence=0.95,
        step=1,
    )


def _patch(evidence: Evidence, names: list[str]) -> Patch:
    """Return the patch that freezes a tower if all unused parameters are in it."""
    tower = names[0].partition(".")[0]
    if evidence.recipe.model.kind.reads != "images" or any(name.partition(".")[0] != tower for name in names):
        return {}
    return {"model.freeze": [*evidence.recipe.model.freeze, tower]}

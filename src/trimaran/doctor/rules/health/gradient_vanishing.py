"""F053: a part of the network hardly gets a gradient."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.module_groups import group_medians, with_groups

FEWEST = 3  # lines that tell of groups
SHARE = 1e-5  # of the largest gradient of any group


def gradient_vanishing(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the gradient of some groups is next to nothing beside that of others."""
    norms = group_medians(evidence, "grad_norm")
    if len(with_groups(evidence)) < FEWEST or not norms or not (most := max(norms.values())):
        return
    faint = {name: norm for name, norm in norms.items() if norm < SHARE * most}
    if not faint:
        return
    least = min(faint, key=lambda name: faint[name])
    strongest = max(norms, key=lambda name: norms[name])
    patch = sound(evidence.recipe, {"plan.precision": "bf16"}) if evidence.plan.precision == "fp16" else {}
    yield Finding(
        code="F053",
        severity="warning",
        verdict=f"{', '.join(list(faint)[:4])} {'gets' if len(faint) == 1 else 'get'} next to no gradient: "
        f"{faint[least]:.2g} in {least}, and {most:.2g} in {strongest}",
        culprit=least,
        evidence={"grad_norm": norms},
        patch=patch,
        fix=""
        if patch
        else f"look at what lies between {least} and the loss: a gate that is shut, a scale near 0, a missing residual",
        expected_effect="small gradients do not round to 0" if patch else "",
        confidence=0.7,
    )

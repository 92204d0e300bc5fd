"""F053: some modules get almost no gradient."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.module_groups import group_medians, steps_with_groups

MIN_STEPS = 3  # with group metrics
VANISHING_FRACTION = 1e-5  # of the largest gradient norm of any group


def gradient_vanishing(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the gradient norm of some groups is tiny compared with the largest one."""
    norms = group_medians(evidence, "grad_norm")
    if len(steps_with_groups(evidence)) < MIN_STEPS or not norms or not (most := max(norms.values())):
        return
    vanishing = {name: norm for name, norm in norms.items() if norm < VANISHING_FRACTION * most}
    if not vanishing:
        return
    weakest = min(vanishing, key=lambda name: vanishing[name])
    strongest = max(norms, key=lambda name: norms[name])
    patch = valid_patch(evidence.recipe, {"plan.precision": "bf16"}) if evidence.plan.precision == "fp16" else {}
    yield Finding(
        code="F053",
        severity="warning",
        verdict=f"{', '.join(list(vanishing)[:4])} {'gets' if len(vanishing) == 1 else 'get'} almost no gradient: "
        f"norm {vanishing[weakest]:.2g} in {weakest}, {most:.2g} in {strongest}",
        culprit=weakest,
        evidence={"grad_norm": norms},
        patch=patch,
        fix=""
        if patch
        else f"check what lies between {weakest} and the loss: a closed gate, a scale near 0, a missing residual",
        expected_effect="small gradients no longer underflow to 0" if patch else "",
        confidence=0.7,
    )

"""F052: gradients grow without an end."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.module_groups import group_medians
from trimaran.doctor.step_breakdown import number

FEWEST = 20  # steps that a verdict needs
WINDOW = 10  # steps at both ends that are compared
TIMES = 10.0
LEAST = 10.0  # a norm below this hurts nobody


def gradient_explosion(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the gradient norm ends far above where it was, and above what clipping is meant for."""
    norms = [norm for each in evidence.steps if (norm := number(each, "grad_norm")) is not None]
    if len(norms) < FEWEST:
        return
    train, now = evidence.recipe.train, median(norms[-WINDOW:])
    usual = min(median(norms[start : start + WINDOW]) for start in range(0, len(norms) - WINDOW + 1, WINDOW))
    if now < TIMES * usual or now < LEAST * max(1.0, train.clip_norm):
        return
    groups = group_medians(evidence, "grad_norm", last=3)
    most = max(groups, key=lambda name: groups[name], default="")
    patch = {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 10:.2g}")}
    yield Finding(
        code="F052",
        severity="warning",
        verdict=f"the gradient norm has grown from {usual:.3g} to {now:.3g}"
        + (f", most in {most} ({groups[most]:.3g})" if most else ""),
        culprit=most or "the gradients",
        evidence={"before": usual, "now": now, "clip_norm": train.clip_norm, "lr": train.lr, "groups": groups},
        patch=sound(evidence.recipe, patch),
        expected_effect="updates stay in proportion to the weights",
        confidence=0.8,
    )

"""F052: the gradient norm explodes."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.module_groups import group_medians
from trimaran.doctor.step_breakdown import get_number

MIN_STEPS = 20
WINDOW_STEPS = 10  # whose median is compared
MIN_GROWTH_FACTOR = 10.0
MIN_NORM_OVER_CLIP = 10.0  # a norm below this, times clip_norm, is harmless


def gradient_explosion(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the gradient norm ends far above where it was, and far above the clipping norm."""
    norms = [norm for each in evidence.steps if (norm := get_number(each, "grad_norm")) is not None]
    if len(norms) < MIN_STEPS:
        return
    train, now = evidence.recipe.train, median(norms[-WINDOW_STEPS:])
    starts = range(0, len(norms) - WINDOW_STEPS + 1, WINDOW_STEPS)
    usual = min(median(norms[start : start + WINDOW_STEPS]) for start in starts)
    if now < MIN_GROWTH_FACTOR * usual or now < MIN_NORM_OVER_CLIP * max(1.0, train.clip_norm):
        return
    groups = group_medians(evidence, "grad_norm", last=3)
    most = max(groups, key=lambda name: groups[name], default="")
    patch = {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 10:.2g}")}
    yield Finding(
        code="F052",
        severity="warning",
        verdict=f"the gradient norm grew from {usual:.3g} to {now:.3g}"
        + (f", and is largest in {most} ({groups[most]:.3g})" if most else ""),
        culprit=most or "the gradients",
        evidence={"before": usual, "now": now, "clip_norm": train.clip_norm, "lr": train.lr, "groups": groups},
        patch=valid_patch(evidence.recipe, patch),
        expected_effect="updates stay in proportion to the weights",
        confidence=0.8,
    )

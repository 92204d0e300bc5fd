"""F056: the learning rate is too high."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.module_groups import steps_with_groups
from trimaran.doctor.step_breakdown import get_number

MIN_STEPS = 20
WINDOW_STEPS = 10  # whose median is the last loss
MIN_LOSS_RISE_FRACTION = 0.02  # of the first loss
# Ratios of update to weight norm, of the median group. Tiny decoders learn best at 0.04.
LARGE_UPDATE_RATIO = 0.03  # too large if the loss does not fall
HUGE_UPDATE_RATIO = 0.1  # always too large: within some steps the weights are overwritten
TARGET_UPDATE_RATIO = 0.02  # that the patch aims for


def learning_rate_high(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if updates are huge compared with the weights, or large while the loss is above its start.

    Updates are largest in the first steps, before the weights have grown, so those steps must be in the evidence.
    """
    losses = [loss for each in evidence.steps if (loss := get_number(each, "loss")) is not None]
    if len(losses) < MIN_STEPS or evidence.steps[0]["step"] > WINDOW_STEPS:
        return
    first, last, highest = losses[0], median(losses[-WINDOW_STEPS:]), max(losses)
    ratio, at, most = _largest_update(evidence)
    early_jump = max(losses[:MIN_STEPS]) > first + max(1.0, 0.25 * first)
    risen = last > first * (1 + MIN_LOSS_RISE_FRACTION) or early_jump
    if not (ratio > HUGE_UPDATE_RATIO or (risen and (ratio > LARGE_UPDATE_RATIO or not ratio))):
        return
    lr = evidence.recipe.train.lr
    factor = min(0.5, max(0.01, TARGET_UPDATE_RATIO / ratio)) if ratio else 0.1
    yield Finding(
        code="F056",
        severity="warning",
        verdict=(f"the update at step {at} was {ratio:.2g} of the weight norm, and " if ratio else "")
        + (f"the loss rose from {first:.4g} to {highest:.4g} and" if risen else "the loss")
        + f" is at {last:.4g}: a learning rate of {lr:g} is too high",
        culprit=f"train.lr {lr:g}" + (f", most in {most}" if most else ""),
        evidence={"first_loss": first, "last_loss": last, "highest_loss": highest, "update_ratio": ratio, "lr": lr},
        patch=valid_patch(evidence.recipe, {"train.lr": float(f"{lr * factor:.1g}")}),
        expected_effect=f"updates of at most {ratio * factor:.2g} of the weight norm" if ratio else "the loss falls",
        confidence=0.9 if ratio else 0.6,
    )


def _largest_update(evidence: Evidence) -> tuple[float, int, str]:
    """Return the largest update ratio of the median group, its step, and the group with the largest ratio there."""
    best = (0.0, 0, "")
    for step in steps_with_groups(evidence):
        ratios = {name: ratio for name in step["groups"]
                  if (ratio := get_number(step, "groups", name, "update_ratio")) is not None}  # fmt: skip
        if ratios and (middle := median(ratios.values())) > best[0]:
            best = middle, int(step["step"]), max(ratios, key=lambda name: ratios[name])
    return best

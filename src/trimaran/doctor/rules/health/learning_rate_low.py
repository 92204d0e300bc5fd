"""F057: the learning rate is too low."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.module_groups import group_medians
from trimaran.doctor.step_breakdown import get_number

MIN_STEPS = 30
TINY_UPDATE_RATIO = 1e-5  # of update to weight norm
MIN_LOSS_FALL_FRACTION = 0.01
TARGET_UPDATE_RATIO = 1e-3  # that the patch aims for
MAX_LR_FACTOR = 10_000.0


def learning_rate_low(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if updates are tiny compared with the weights and the loss does not fall."""
    losses = [loss for each in evidence.steps if (loss := get_number(each, "loss")) is not None]
    ratios = group_medians(evidence, "update_ratio", near_peak=True)
    if len(losses) < MIN_STEPS or not ratios or not 0 < (ratio := median(ratios.values())) < TINY_UPDATE_RATIO:
        return
    first, last = median(losses[:10]), median(losses[-10:])
    if last < first * (1 - MIN_LOSS_FALL_FRACTION):
        return
    lr = evidence.recipe.train.lr
    wanted = min(10.0, float(f"{lr * min(MAX_LR_FACTOR, TARGET_UPDATE_RATIO / ratio):.1g}"))
    yield Finding(
        code="F057",
        severity="warning",
        verdict=f"updates are {ratio:.2g} of the weight norm, and the loss went from {first:.4g} to {last:.4g} "
        f"in {len(losses)} steps: a learning rate of {lr:g} is too low",
        culprit=f"train.lr {lr:g}",
        evidence={"update_ratio": ratios, "first_loss": first, "last_loss": last, "lr": lr},
        patch=valid_patch(evidence.recipe, {"train.lr": wanted}),
        expected_effect=f"updates of about {ratio * wanted / lr:.1g} of the weight norm",
        confidence=0.8,
    )

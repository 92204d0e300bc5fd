"""F057: the learning rate is too low."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.module_groups import group_medians
from trimaran.doctor.step_breakdown import number

FEWEST = 30  # steps that a verdict needs
SMALL = 1e-5  # of a weight: less than an update should move it
FALL = 0.01  # of the loss: less than it should have fallen by
AIM = 1e-3  # what the patch should make of it
MOST = 10_000.0  # times


def learning_rate_low(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when updates are tiny beside the weights and the loss does not fall."""
    losses = [loss for each in evidence.steps if (loss := number(each, "loss")) is not None]
    ratios = group_medians(evidence, "update_ratio", near_peak=True)
    if len(losses) < FEWEST or not ratios or not 0 < (ratio := median(ratios.values())) < SMALL:
        return
    first, last = median(losses[:10]), median(losses[-10:])
    if last < first * (1 - FALL):
        return
    lr = evidence.recipe.train.lr
    wanted = min(10.0, float(f"{lr * min(MOST, AIM / ratio):.1g}"))
    yield Finding(
        code="F057",
        severity="warning",
        verdict=f"an update moves a weight by {ratio:.2g} of itself, and the loss went from {first:.4g} to {last:.4g} "
        f"in {len(losses)} steps: a learning rate of {lr:g} teaches next to nothing",
        culprit=f"train.lr {lr:g}",
        evidence={"update_ratio": ratios, "first_loss": first, "last_loss": last, "lr": lr},
        patch=sound(evidence.recipe, {"train.lr": wanted}),
        expected_effect=f"updates of about {ratio * wanted / lr:.1g} of a weight",
        confidence=0.8,
    )

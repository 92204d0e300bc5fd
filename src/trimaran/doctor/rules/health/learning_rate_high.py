"""F056: the learning rate is too high."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.module_groups import with_groups
from trimaran.doctor.step_breakdown import number

FEWEST = 20  # steps that a verdict needs
WINDOW = 10
RISE = 0.02  # of the first loss: what it must have risen by
# Shares of a weight that an update moves it by, at most, in the group in the middle. Tiny decoders learn best at 0.04.
LARGE = 0.03  # too much where the loss does not fall
HUGE = 0.1  # too much wherever it goes: what was there before is lost within some steps
AIM = 0.02  # what the patch should make of it


def learning_rate_high(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when updates are huge beside the weights, or large while the loss is above where it began.

    They are largest in the first steps, before the weights have grown: a run that is looked at late has none to show.
    """
    losses = [loss for each in evidence.steps if (loss := number(each, "loss")) is not None]
    if len(losses) < FEWEST or evidence.steps[0]["step"] > WINDOW:
        return
    first, last, highest = losses[0], median(losses[-WINDOW:]), max(losses)
    ratio, at, most = _largest_update(evidence)
    risen = last > first * (1 + RISE) or max(losses[:FEWEST]) > first + max(1.0, 0.25 * first)
    if not (ratio > HUGE or (risen and (ratio > LARGE or not ratio))):
        return
    lr = evidence.recipe.train.lr
    factor = min(0.5, max(0.01, AIM / ratio)) if ratio else 0.1
    yield Finding(
        code="F056",
        severity="warning",
        verdict=(f"an update moved weights by {ratio:.2g} of themselves at step {at}, and " if ratio else "")
        + (f"the loss rose from {first:.4g} to {highest:.4g} and" if risen else "the loss")
        + f" is at {last:.4g}: a learning rate of {lr:g} is too high",
        culprit=f"train.lr {lr:g}" + (f", most in {most}" if most else ""),
        evidence={"first_loss": first, "last_loss": last, "highest_loss": highest, "update_ratio": ratio, "lr": lr},
        patch=sound(evidence.recipe, {"train.lr": float(f"{lr * factor:.1g}")}),
        expected_effect=f"updates of at most {ratio * factor:.2g} of a weight" if ratio else "the loss falls",
        confidence=0.9 if ratio else 0.6,
    )


def _largest_update(evidence: Evidence) -> tuple[float, int, str]:
    """Return the largest update that the group in the middle has seen, at which step, and which group moved most."""
    best = (0.0, 0, "")
    for step in with_groups(evidence):
        ratios = {name: ratio for name in step["groups"]
                  if (ratio := number(step, "groups", name, "update_ratio")) is not None}  # fmt: skip
        if ratios and (middle := median(ratios.values())) > best[0]:
            best = middle, int(step["step"]), max(ratios, key=lambda name: ratios[name])
    return best

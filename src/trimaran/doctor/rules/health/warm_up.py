"""F058: the loss rises at the start, without learning-rate warm-up."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.step_breakdown import get_number

EARLY_STEPS = 20  # in which the loss may rise
MIN_WARMUP_STEPS = 5  # fewer are as good as none
MIN_LOSS_RISE_FRACTION = 0.05  # of the first loss
MIN_PATCHED_WARMUP_STEPS = 10


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if there is no warm-up and the loss rises before it falls."""
    train = evidence.recipe.train
    early = [each for each in evidence.steps if each["step"] <= EARLY_STEPS]
    losses = [loss for each in early if (loss := get_number(each, "loss")) is not None]
    if train.schedule.warmup_steps >= MIN_WARMUP_STEPS or len(losses) < EARLY_STEPS // 2 or early[0]["step"] != 1:
        return
    peak = max(losses[1:])
    if peak < losses[0] * (1 + MIN_LOSS_RISE_FRACTION):
        return
    steps = max(MIN_PATCHED_WARMUP_STEPS, round(0.02 * train.steps))
    yield Finding(
        code="F058",
        severity="warning",
        verdict=f"the loss rose from {losses[0]:.4g} to {peak:.4g} in the first {len(losses)} steps, and the learning "
        f"rate is {train.lr:g} from step {max(1, train.schedule.warmup_steps)} on",
        culprit=f"train.schedule.warmup_steps {train.schedule.warmup_steps}",
        evidence={"first_loss": losses[0], "highest_loss": peak, "lr": train.lr},
        patch=valid_patch(evidence.recipe, {"train.schedule.warmup_steps": steps}),
        expected_effect="Adam estimates the size of the gradients before it takes large steps",
        confidence=0.8,
    )

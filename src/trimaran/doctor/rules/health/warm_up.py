"""F058: the run starts at full speed and stumbles."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.step_breakdown import number

EARLY = 20  # steps in which a start stumbles
SHORT = 5  # steps of warm-up that are as good as none
RISE = 0.05  # of the first loss
LEAST_STEPS = 10


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when there is no warm-up and the loss rises before it falls."""
    train = evidence.recipe.train
    early = [each for each in evidence.steps if each["step"] <= EARLY]
    losses = [loss for each in early if (loss := number(each, "loss")) is not None]
    if train.schedule.warmup_steps >= SHORT or len(losses) < EARLY // 2 or early[0]["step"] != 1:
        return
    peak = max(losses[1:])
    if peak < losses[0] * (1 + RISE):
        return
    steps = max(LEAST_STEPS, round(0.02 * train.steps))
    yield Finding(
        code="F058",
        severity="warning",
        verdict=f"the loss rose from {losses[0]:.4g} to {peak:.4g} in the first {len(losses)} steps, and the learning "
        f"rate is {train.lr:g} from step {max(1, train.schedule.warmup_steps)} on",
        culprit=f"train.schedule.warmup_steps {train.schedule.warmup_steps}",
        evidence={"first_loss": losses[0], "highest_loss": peak, "lr": train.lr},
        patch=sound(evidence.recipe, {"train.schedule.warmup_steps": steps}),
        expected_effect="Adam knows the size of the gradients before it takes large steps",
        confidence=0.8,
    )

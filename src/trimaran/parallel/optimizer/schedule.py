"""The learning rate as a function of the step."""

import math

from trimaran.core import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0. A pure function: resuming needs no state."""
    schedule = train.schedule
    if step < schedule.warmup_steps:
        return train.lr * (step + 1) / schedule.warmup_steps
    length = max(1, train.steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / length)
    match schedule.kind:
        case "cosine":
            fraction = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            fraction = 1 - progress
        case "wsd":
            decay_steps = schedule.decay_steps or max(1, train.steps // 5)
            fraction = min(1.0, max(0, train.steps - step) / decay_steps)
        case "constant":
            fraction = 1.0
    return train.lr * (schedule.floor + (1 - schedule.floor) * fraction)

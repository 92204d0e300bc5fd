"""The learning rate as a function of the step."""

import math

from trimaran.core import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the rate of optimizer step `step` (the first is 0). A pure function, so resuming needs no state."""
    schedule = train.schedule
    if step < schedule.warmup_steps:
        return train.lr * (step + 1) / schedule.warmup_steps
    length = max(1, train.steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / length)
    match schedule.kind:
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            share = 1 - progress
        case "wsd":
            slope = schedule.decay_steps or max(1, train.steps // 5)
            share = min(1.0, max(0, train.steps - step) / slope)
        case "constant":
            share = 1.0
    return train.lr * (schedule.floor + (1 - schedule.floor) * share)

"""Says when a resumed run with another number of steps has another learning rate at once."""

from trimaran.checkpoint.step_dirs import complete_steps
from trimaran.core import Recipe, TrainSection
from trimaran.runs import RunDirectory

MIN_CHANGE = 0.05  # relative; a smaller change of the learning rate is not worth a line


def schedule_notice(run: RunDirectory, new: Recipe) -> str:
    """Return a line about the learning rate of the next step if the new schedule changes it at once; else empty."""
    made = max(complete_steps(run.checkpoints), default=0)
    return learning_rate_change(run.read_recipe().train, new.train, made) if made else ""


def learning_rate_change(old: TrainSection, new: TrainSection, made: int) -> str:
    """Return how the learning rate of the step after the first `made` differs from that of the old schedule.

    After the last step of the old schedule the learning rate would stay at the last value.
    """
    from trimaran.parallel.optimizer.build_optimizer import learning_rate

    before, after = learning_rate(min(made, old.steps - 1), old), learning_rate(made, new)
    if abs(after - before) < MIN_CHANGE * before:
        return ""
    direction = "rises" if after > before else "falls"
    return (
        f"the {new.schedule.kind} schedule now has {new.steps:,} steps, before {old.steps:,}: with step {made + 1:,} "
        f"the learning rate {direction} at once from {before:.3g} to {after:.3g} ({after / before:.2g} times)"
    )

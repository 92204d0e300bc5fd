"""Rules about the loss and the learning rate."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import group_medians, plural, rank_names, steps_with_groups, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_number, get_numbers

SPIKE_WINDOW_STEPS = 20  # before a spike, whose median it is compared with
# A spike exceeds the median by all of these: an absolute amount, a fraction of it, and a multiple of the deviation.
MIN_SPIKE, MIN_SPIKE_FRACTION, MIN_DEVIATIONS = 0.5, 0.5, 10.0
SPIKE_REASON = "the loss j"  # how the guard's reason starts if it skipped a step because of a spike


def loss_spike(evidence: Evidence) -> Iterator[Finding]:
    """Yield F051 if the loss of a step is far above those before it, whether its update was skipped or not."""
    skipped = [
        each for each in evidence.events_of_kind("skip") if str(each["data"].get("reason", "")).startswith(SPIKE_REASON)
    ]
    applied = list(_applied_spikes(evidence))
    refused: list[Line] = [
        {"step": int(each.get("step") or 0), "loss": get_number(each, "data", "loss") or 0.0, "before": 0.0}
        for each in skipped
    ]
    last = max([*refused, *applied], key=lambda each: each["step"], default=None)
    if last is None:
        return
    ranks, train = skipped[-1]["data"].get("ranks") or () if skipped else (), evidence.recipe.train
    patch: Patch = {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 2:.2g}")}
    if ranks and evidence.recipe.faults.not_finite == "skip":  # the samples of these ranks were bad
        patch = {"faults.not_finite": "rewind"}
    patch = valid_patch(evidence.recipe, patch)
    rise = f", from {last['before']:.4g} to {last['loss']:.4g}" if last["before"] else f" to {last['loss']:.4g}"
    yield Finding(
        code="F051",
        severity="warning",
        verdict=f"the loss spiked at {plural(len(skipped) + len(applied), 'step')}, the last time at step "
        f"{last['step']}{rise}; {plural(len(skipped), 'update')} skipped",
        culprit=rank_names(ranks) or f"step {last['step']}",
        evidence={
            "refused": [each.get("step") for each in skipped[-8:]],
            "applied": [each["step"] for each in applied[-8:]],
            "sample_ids": list(skipped[-1]["data"].get("sample_ids") or ())[:8] if skipped else [],
            "lr": train.lr,
        },
        patch=patch,
        fix="" if patch else "check the samples of that step, and what changed before it",
        expected_effect="the run rewinds to the last good state and skips these samples"
        if "faults.not_finite" in patch
        else "one bad gradient changes the weights less",
        confidence=0.8,
        step=last["step"],
    )


def _applied_spikes(evidence: Evidence) -> Iterator[Line]:
    """Yield (step, loss, median before) of the spikes whose update was applied."""
    losses: list[float] = []
    for step in evidence.steps:
        loss = get_number(step, "loss")
        if loss is None or step.get("skipped"):
            continue
        if len(losses) >= SPIKE_WINDOW_STEPS:
            usual = median(losses[-SPIKE_WINDOW_STEPS:])
            deviation = median(abs(each - usual) for each in losses[-SPIKE_WINDOW_STEPS:])
            if loss - usual > max(MIN_SPIKE, MIN_SPIKE_FRACTION * abs(usual), MIN_DEVIATIONS * deviation):
                yield {"step": step["step"], "loss": loss, "before": usual}
        losses.append(loss)


MIN_LOSSES_HIGH = 20
LAST_STEPS = 10  # whose median is the last loss
MIN_RISE_FRACTION = 0.02  # of the first loss
# Ratios of update to weight norm, of the median group. Tiny decoders learn best at 0.04.
LARGE_UPDATE_RATIO = 0.03  # too large if the loss does not fall
HUGE_UPDATE_RATIO = 0.1  # always too large: within some steps the weights are overwritten
LOWERED_UPDATE_RATIO = 0.02  # that the patch aims for


def learning_rate_high(evidence: Evidence) -> Iterator[Finding]:
    """Yield F056 if updates are huge compared with the weights, or large while the loss is above its start.

    Updates are largest in the first steps, before the weights have grown, so those steps must be in the evidence.
    """
    losses = get_numbers(evidence.steps, "loss")
    if len(losses) < MIN_LOSSES_HIGH or evidence.steps[0]["step"] > LAST_STEPS:
        return
    first, last, highest = losses[0], median(losses[-LAST_STEPS:]), max(losses)
    ratio, at, most = _largest_update(evidence)
    early_jump = max(losses[:MIN_LOSSES_HIGH]) > first + max(1.0, 0.25 * first)
    risen = last > first * (1 + MIN_RISE_FRACTION) or early_jump
    if not (ratio > HUGE_UPDATE_RATIO or (risen and (ratio > LARGE_UPDATE_RATIO or not ratio))):
        return
    lr = evidence.recipe.train.lr
    factor = min(0.5, max(0.01, LOWERED_UPDATE_RATIO / ratio)) if ratio else 0.1
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


MIN_LOSSES_LOW = 30
TINY_UPDATE_RATIO = 1e-5  # of update to weight norm
MIN_FALL_FRACTION = 0.01
RAISED_UPDATE_RATIO = 1e-3  # that the patch aims for
MAX_LR_FACTOR = 10_000.0


def learning_rate_low(evidence: Evidence) -> Iterator[Finding]:
    """Yield F057 if updates are tiny compared with the weights and the loss does not fall."""
    losses = get_numbers(evidence.steps, "loss")
    ratios = group_medians(evidence, "update_ratio", near_peak=True)
    if len(losses) < MIN_LOSSES_LOW or not ratios or not 0 < (ratio := median(ratios.values())) < TINY_UPDATE_RATIO:
        return
    first, last = median(losses[:10]), median(losses[-10:])
    if last < first * (1 - MIN_FALL_FRACTION):
        return
    lr = evidence.recipe.train.lr
    wanted = min(10.0, float(f"{lr * min(MAX_LR_FACTOR, RAISED_UPDATE_RATIO / ratio):.1g}"))
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


EARLY_STEPS = 20  # in which the loss may rise
MIN_WARMUP_STEPS = 5  # fewer are as good as none
MIN_EARLY_RISE_FRACTION = 0.05  # of the first loss
MIN_PATCHED_WARMUP_STEPS = 10


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """Yield F058 if there is no warm-up and the loss rises before it falls."""
    train = evidence.recipe.train
    early = [each for each in evidence.steps if each["step"] <= EARLY_STEPS]
    losses = get_numbers(early, "loss")
    if train.schedule.warmup_steps >= MIN_WARMUP_STEPS or len(losses) < EARLY_STEPS // 2 or early[0]["step"] != 1:
        return
    peak = max(losses[1:])
    if peak < losses[0] * (1 + MIN_EARLY_RISE_FRACTION):
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


COMPRESSED_WINDOW_STEPS = 20  # whose median is the loss of a part of the run
MIN_WINDOWS = 3
MIN_COMPRESSED_RISE_FRACTION = 0.02  # above the lowest window of the run
RECENT_ERRORS = 5
# Relative errors of the sum that are too large. With error feedback what is not sent follows later: an error of 1 to 2
# is normal, and more means that what is sent is old.
MAX_ERROR, MAX_ERROR_WITH_FEEDBACK = 0.5, 3.0


def compression_harm(evidence: Evidence) -> Iterator[Finding]:
    """Yield F075 if the error of the compressed sum is large and the loss rises above the run's own trend."""
    settings = evidence.plan.comm.compression_settings
    errors = get_numbers(evidence.steps, "compression_error")
    losses = get_numbers((each for each in evidence.steps if not each.get("skipped")), "loss")
    if not errors or len(losses) < MIN_WINDOWS * COMPRESSED_WINDOW_STEPS:
        return
    edges = range(len(losses) % COMPRESSED_WINDOW_STEPS, len(losses) + 1, COMPRESSED_WINDOW_STEPS)
    windows = [median(losses[first:last]) for first, last in pairwise(edges)]
    error, lowest, last = median(errors[-RECENT_ERRORS:]), min(windows), windows[-1]
    limit = MAX_ERROR_WITH_FEEDBACK if settings.keeps_residual else MAX_ERROR
    if error <= limit or last <= lowest + MIN_COMPRESSED_RISE_FRACTION * abs(lowest):
        return
    yield Finding(
        code="F075",
        severity="warning",
        verdict=f"the sum of gradients compressed by {settings.kind} is {error:.2g} of its size off, and the loss rose "
        f"from {lowest:.4g} to {last:.4g}",
        culprit=f"plan.comm.compression {settings.kind}",
        evidence={"error": error, "limit": limit, "lowest_loss": lowest, "last_loss": last, "errors": errors[-8:]},
        patch=valid_patch(evidence.recipe, {"plan.comm.compression": "bf16"}),
        expected_effect="gradients are rounded to 16 bits only; more bytes are sent",
        confidence=0.6,
    )

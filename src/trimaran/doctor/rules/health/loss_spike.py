"""F051: the loss spikes."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import plural, rank_names, valid_patch
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import get_number

WINDOW_STEPS = 20  # before a spike, whose median it is compared with
# A spike exceeds the median by all of these: an absolute amount, a fraction of it, and a multiple of the deviation.
MIN_RISE, MIN_RISE_FRACTION, MIN_DEVIATIONS = 0.5, 0.5, 10.0
SPIKE_REASON = "the loss j"  # how the guard's reason starts if it skipped a step because of a spike


def loss_spike(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the loss of a step is far above those before it, whether its update was skipped or not."""
    skipped = [
        each for each in evidence.events_of_kind("skip") if str(each["data"].get("reason", "")).startswith(SPIKE_REASON)
    ]
    applied = list(_applied_spikes(evidence))
    if not skipped and not applied:
        return
    ranks = skipped[-1]["data"].get("ranks") or () if skipped else ()
    last, patch = _last(skipped, applied), valid_patch(evidence.recipe, _patch(evidence, bool(skipped and ranks)))
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
            "lr": evidence.recipe.train.lr,
        },
        patch=patch,
        fix="" if patch else "check the samples of that step, and what changed before it",
        expected_effect=_effect(patch),
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
        if len(losses) >= WINDOW_STEPS:
            usual = median(losses[-WINDOW_STEPS:])
            deviation = median(abs(each - usual) for each in losses[-WINDOW_STEPS:])
            if loss - usual > max(MIN_RISE, MIN_RISE_FRACTION * abs(usual), MIN_DEVIATIONS * deviation):
                yield {"step": step["step"], "loss": loss, "before": usual}
        losses.append(loss)


def _last(skipped: list[Line], applied: list[Line]) -> Line:
    spikes = [{"step": int(each.get("step") or 0), "loss": get_number(each, "data", "loss") or 0.0, "before": 0.0}
              for each in skipped]  # fmt: skip
    return max([*spikes, *applied], key=lambda each: each["step"])


def _patch(evidence: Evidence, by_samples: bool) -> Patch:
    """Return the patch: skip the samples if those of one rank were bad, else clip or lower the learning rate."""
    train = evidence.recipe.train
    if by_samples and evidence.recipe.faults.not_finite == "skip":
        return {"faults.not_finite": "rewind"}
    return {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 2:.2g}")}


def _effect(patch: Patch) -> str:
    if "faults.not_finite" in patch:
        return "the run rewinds to the last good state and skips these samples"
    return "one bad gradient changes the weights less"

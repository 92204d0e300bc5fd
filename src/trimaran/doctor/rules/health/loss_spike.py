"""F051: the loss jumps."""

from collections.abc import Iterator
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence, Line
from trimaran.doctor.evidence_queries import rank_names, sound, times
from trimaran.doctor.predicted_gain import Patch
from trimaran.doctor.step_breakdown import number

BEFORE = 20  # steps that a jump is measured against
LEAST = 0.5  # a smaller jump means nothing
SHARE = 0.5  # of the usual loss
SPREADS = 10.0  # times the usual distance from the median


def loss_spike(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the loss of a step is far above that of those before it, refused or not."""
    refused = [
        each for each in evidence.of_kind("skip") if str(each["data"].get("reason", "")).startswith("the loss j")
    ]
    jumps = list(_jumps(evidence))
    if not refused and not jumps:
        return
    ranks = refused[-1]["data"].get("ranks") or () if refused else ()
    last, patch = _last(refused, jumps), sound(evidence.recipe, _patch(evidence, bool(refused and ranks)))
    by = f", from {last['before']:.4g} to {last['loss']:.4g}" if last["before"] else f" to {last['loss']:.4g}"
    yield Finding(
        code="F051",
        severity="warning",
        verdict=f"the loss jumped at {times(len(refused) + len(jumps), 'step')}, the last time at step {last['step']}"
        f"{by}; {times(len(refused), 'update')} of these not applied",
        culprit=rank_names(ranks) or f"step {last['step']}",
        evidence={
            "refused": [each.get("step") for each in refused[-8:]],
            "applied": [each["step"] for each in jumps[-8:]],
            "sample_ids": list(refused[-1]["data"].get("sample_ids") or ())[:8] if refused else [],
            "lr": evidence.recipe.train.lr,
        },
        patch=patch,
        fix="" if patch else "look at the samples of that step, and at what was changed before it",
        expected_effect=_effect(patch),
        confidence=0.8,
        step=last["step"],
    )


def _jumps(evidence: Evidence) -> Iterator[Line]:
    """Yield the steps whose update was applied though their loss had jumped, and what it had been."""
    calm: list[float] = []
    for step in evidence.steps:
        loss = number(step, "loss")
        if loss is None or step.get("skipped"):
            continue
        if len(calm) >= BEFORE:
            usual = median(calm[-BEFORE:])
            spread = median(abs(each - usual) for each in calm[-BEFORE:])
            if loss - usual > max(LEAST, SHARE * abs(usual), SPREADS * spread):
                yield {"step": step["step"], "loss": loss, "before": usual}
        calm.append(loss)


def _last(refused: list[Line], jumps: list[Line]) -> Line:
    told = [{"step": int(each.get("step") or 0), "loss": number(each, "data", "loss") or 0.0, "before": 0.0}
            for each in refused]  # fmt: skip
    return max([*told, *jumps], key=lambda each: each["step"])


def _patch(evidence: Evidence, by_samples: bool) -> Patch:
    """Return what answers it: other samples where one rank's share was bad, else shorter steps."""
    train = evidence.recipe.train
    if by_samples and evidence.recipe.faults.not_finite == "skip":
        return {"faults.not_finite": "rewind"}
    return {"train.clip_norm": 1.0} if not train.clip_norm else {"train.lr": float(f"{train.lr / 2:.2g}")}


def _effect(patch: Patch) -> str:
    if "faults.not_finite" in patch:
        return "the run goes back to the last good state and leaves these samples out"
    return "one bad gradient moves the weights less"

"""F054: the fp16 loss scale collapses."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.step_breakdown import get_number

MIN_LOSS_SCALE = 16.0  # below this, small gradients underflow to 0
MAX_SKIPPED_IN_A_ROW = 4  # fewer skipped steps are the normal search for a scale


def loss_scale_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the loss scale has fallen close to 1, or the run ended because it could not fall further."""
    scales = [scale for each in evidence.steps if (scale := get_number(each, "loss_scale")) is not None]
    ended = any(each["data"].get("code") == "P030" for each in evidence.events_of_kind("error"))
    recently_skipped = [bool(each.get("skipped")) for each in evidence.steps][-MAX_SKIPPED_IN_A_ROW:]
    low = bool(scales) and scales[-1] < MIN_LOSS_SCALE
    if not ended and not (low and all(recently_skipped)) and not (scales and scales[-1] < 1.0):
        return
    skipped = sum(bool(each.get("skipped")) for each in evidence.steps)
    now = scales[-1] if scales else 0.0
    yield Finding(
        code="F054",
        severity="fault" if ended else "warning",
        verdict=f"the loss scale fell from {max(scales, default=0.0):g} to {now:g} and {skipped} of "
        f"{len(evidence.steps)} updates were skipped: the fp16 gradients are not finite",
        culprit=f"plan.precision {evidence.plan.precision}",
        evidence={"scale": now, "highest": max(scales, default=None), "skipped": skipped, "ended": ended},
        patch=valid_patch(evidence.recipe, {"plan.precision": "bf16"}),
        expected_effect="bf16 has the range of fp32 and needs no loss scale",
        confidence=0.95,
    )

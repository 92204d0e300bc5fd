"""F054: fp16 finds no scale at which its gradients are finite."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import sound
from trimaran.doctor.step_breakdown import number

LOW = 16.0  # a scale below this leaves small gradients at 0
FALLING = 4  # steps in a row without an update that are no search any more


def loss_scale_collapse(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when the loss scale has fallen to next to nothing, or could fall no further."""
    scales = [scale for each in evidence.steps if (scale := number(each, "loss_scale")) is not None]
    ended = any(each["data"].get("code") == "P030" for each in evidence.of_kind("error"))
    refused = [bool(each.get("skipped")) for each in evidence.steps][-FALLING:]
    low = bool(scales) and scales[-1] < LOW
    if not ended and not (low and all(refused)) and not (scales and scales[-1] < 1.0):
        return
    skipped = sum(bool(each.get("skipped")) for each in evidence.steps)
    now = scales[-1] if scales else 0.0
    yield Finding(
        code="F054",
        severity="fault" if ended else "warning",
        verdict=f"the loss scale fell from {max(scales, default=0.0):g} to {now:g} and {skipped} of "
        f"{len(evidence.steps)} updates were not applied: in fp16 the gradients are not finite",
        culprit=f"plan.precision {evidence.plan.precision}",
        evidence={"scale": now, "highest": max(scales, default=None), "skipped": skipped, "ended": ended},
        patch=sound(evidence.recipe, {"plan.precision": "bf16"}),
        expected_effect="bf16 has the range of fp32 and needs no scale",
        confidence=0.95,
    )

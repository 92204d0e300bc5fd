"""F075: compressed gradients hurt training."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.evidence_queries import valid_patch
from trimaran.doctor.step_breakdown import get_number

WINDOW_STEPS = 20  # whose median is the loss of a part of the run
MIN_WINDOWS = 3
MIN_LOSS_RISE_FRACTION = 0.02  # above the lowest window of the run
RECENT_ERRORS = 5
# Relative errors of the sum that are too large. With error feedback what is not sent follows later: an error of 1 to 2
# is normal, and more means that what is sent is old.
MAX_ERROR, MAX_ERROR_WITH_FEEDBACK = 0.5, 3.0


def compression_harm(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the error of the compressed sum is large and the loss rises above the run's own trend."""
    settings = evidence.plan.comm.compression_settings
    errors = [error for each in evidence.steps if (error := get_number(each, "compression_error")) is not None]
    losses = [loss for each in evidence.steps if (loss := get_number(each, "loss")) is not None
              and not each.get("skipped")]  # fmt: skip
    if not errors or len(losses) < MIN_WINDOWS * WINDOW_STEPS:
        return
    edges = range(len(losses) % WINDOW_STEPS, len(losses) + 1, WINDOW_STEPS)
    windows = [median(losses[first:last]) for first, last in pairwise(edges)]
    error, lowest, last = median(errors[-RECENT_ERRORS:]), min(windows), windows[-1]
    limit = MAX_ERROR_WITH_FEEDBACK if settings.keeps_residual else MAX_ERROR
    if error <= limit or last <= lowest + MIN_LOSS_RISE_FRACTION * abs(lowest):
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

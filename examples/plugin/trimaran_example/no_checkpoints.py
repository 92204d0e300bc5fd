"""A doctor rule: a rule of the house, that every run writes checkpoints."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence


class NoCheckpoints:
    contract = 1

    def __call__(self, evidence: Evidence) -> Iterator[Finding]:
        if evidence.recipe.checkpoint.is_off:
            seconds = sum(each["step_seconds"] for each in evidence.steps)
            yield Finding(
                code="EXAMPLE-NO-CHECKPOINTS",
                severity="warning",
                verdict=f"a fault would cost all {evidence.last_step} steps: the run writes no checkpoints",
                culprit="checkpoint.every",
                evidence={"steps": evidence.last_step, "step_seconds": seconds},
                patch={"checkpoint.every": "auto"},
                expected_effect="a fault costs the steps since the last checkpoint",
            )

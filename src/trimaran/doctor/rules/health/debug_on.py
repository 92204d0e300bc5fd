"""F078: the run is slow because debugging is switched on."""

from collections.abc import Iterator

from trimaran.core import Finding
from trimaran.doctor.evidence import Evidence


def debug_on(evidence: Evidence) -> Iterator[Finding]:
    """Yield a note if the recipe switches debugging on, so that nobody compares its speed."""
    if evidence.recipe.faults.debug and evidence.steps:
        yield Finding(
            code="F078",
            severity="note",
            verdict="debugging is on: all ranks compare every collective, and the host waits for every kernel",
            culprit="faults.debug",
            evidence={},
            patch={"faults.debug": False},
            expected_effect="steps take their usual time",
            confidence=1.0,
        )

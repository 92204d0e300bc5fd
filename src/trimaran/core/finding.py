"""What the doctor finds, and what the autopilot decides."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosis: a verdict with its evidence, the patch that fixes it and the expected effect of the patch.

    `culprit` names the cause, such as `rank 3` or `layers.2.mlp`. It contains no measurement: together with the code it
    identifies a finding, so that known findings are not reported again. `patch` maps recipe fields to values, the pairs
    that `--set` takes. If no setting fixes it, `fix` says what the user can do. `gain` is the fraction of step time
    that the patch should save by the cost model; `confidence` is how certain the verdict is. Both are from 0 to 1.
    `step` is the last step of the evidence.
    """

    code: str
    severity: Literal["note", "warning", "fault"]
    verdict: str
    culprit: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    patch: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    expected_effect: str = ""
    gain: float | None = None
    confidence: float = 1.0
    step: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change that the autopilot made at `step`, why, and whether it was kept. `effect` is measured."""

    step: int
    finding: str
    patch: dict[str, Any]
    outcome: Literal["pending", "kept", "rolled-back"] = "pending"
    effect: dict[str, float] = field(default_factory=dict)

"""What a doctor says and what an autopilot decides."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosis: a verdict with its evidence, the patch that mends it and what the patch should bring.

    `culprit` names who causes it, such as `rank 3` or `layers.2.mlp`: nothing measured is in it, since with the code it
    tells a finding that was told before from a new one. `patch` maps recipe fields to values, the same
    pairs that `--set` takes; where no setting mends it, `fix` says what a person does. `gain` is the share of step time
    that the patch should save by the cost model, and `confidence` how sure the verdict is, both from 0 to 1. `step` is
    the last one that was looked at.
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
    """One change the autopilot made at `step`, why, and whether it was kept. `effect` is measured, not hoped for."""

    step: int
    finding: str
    patch: dict[str, Any]
    outcome: Literal["pending", "kept", "rolled-back"] = "pending"
    effect: dict[str, float] = field(default_factory=dict)

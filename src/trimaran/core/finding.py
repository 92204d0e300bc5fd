"""What a doctor says and what an autopilot decides."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosis: a verdict with its evidence, the patch that mends it and what the patch should bring.

    `patch` maps recipe fields to values, the same pairs that `--set` takes.
    """

    code: str
    severity: Literal["note", "warning", "fault"]
    verdict: str
    evidence: dict[str, Any] = field(default_factory=dict)
    patch: dict[str, Any] = field(default_factory=dict)
    expected_effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change the autopilot made at `step`, why, and whether it was kept. `effect` is measured, not hoped for."""

    step: int
    finding: str
    patch: dict[str, Any]
    outcome: Literal["pending", "kept", "rolled-back"] = "pending"
    effect: dict[str, float] = field(default_factory=dict)

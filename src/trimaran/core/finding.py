"""What the doctor finds, and what the autopilot decides."""

import math
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


DecisionOutcome = Literal["advised", "trying", "kept", "rolled-back", "refused", "failed", "undone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change of a running run: why, what was expected, what was measured; a line of `decisions.jsonl`.

    `step` is the last step before it. `finding` is the code of the doctor's finding, empty if there was none. `reason`
    is one sentence. `undo` is the patch that takes `patch` back. `expected` has the fraction of a step that the change
    should save (`gain`), how uncertain that is (`uncertainty`) and the resulting `step_seconds`; of a change that saves
    memory also `peak_bytes`. `baseline` is the step before the change: `step_seconds`, its relative `spread` and the
    number of `steps`. `measured` has `step_seconds`, `gain`, `confidence` (that steps are shorter), `steps` and
    `pause_seconds`; None if nothing was measured. `request` is the last request about it, see `change.json`.
    """

    id: int
    time: float
    step: int
    finding: str
    reason: str
    patch: dict[str, Any]
    undo: dict[str, Any]
    expected: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] | None = None
    outcome: DecisionOutcome = "trying"
    by: Literal["autopilot", "user"] = "autopilot"
    request: int = 0

    @property
    def trial_seconds(self) -> float:
        """What the trial cost: pauses, and steps that were longer than before."""
        measured, before = self.measured, self.baseline.get("step_seconds", 0.0)
        if not measured:
            return 0.0
        longer = measured.get("steps", 0.0) * (measured.get("step_seconds", before) - before)
        lost = longer if self.outcome != "kept" and math.isfinite(longer) else 0.0
        return measured.get("pause_seconds", 0.0) + max(0.0, lost)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

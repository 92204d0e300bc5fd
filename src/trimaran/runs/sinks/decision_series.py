"""Prometheus series of the autopilot's decisions."""

from typing import get_args

from trimaran.core import DecisionOutcome
from trimaran.runs.decision_records import DecisionReader
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.series import Series


class DecisionSeries:
    """Follows the decisions of a run. Every outcome starts at 0, so that `increase()` sees the first one."""

    def __init__(self, series: Series, run: RunDirectory) -> None:
        self._series, self._reader = series, DecisionReader(run)
        self._counted: set[tuple[int, str]] = set()
        for outcome in get_args(DecisionOutcome):
            series.add("decisions", 0, outcome=outcome)
        series.set("trial_seconds", 0.0)

    def poll(self) -> None:
        """Show what was decided since the last call. Without a new line it is one system call."""
        new = self._reader.new()
        for decision in new.values():
            state = decision.id, decision.outcome
            if state not in self._counted:
                self._counted.add(state)
                self._series.add("decisions", outcome=decision.outcome)
            if decision.outcome != "advised":
                self._series.set("decision_expected_gain_ratio", decision.expected.get("gain"))
                self._series.set("decision_measured_gain_ratio", (decision.measured or {}).get("gain"))
        if new:
            spent = sum(each.trial_seconds for each in self._reader.decisions.values())
            self._series.set("trial_seconds", spent)

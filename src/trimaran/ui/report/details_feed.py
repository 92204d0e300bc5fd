"""The details of some steps, evenly spread over a run, kept up to date as lines are appended."""

from trimaran.runs import LineFollower, RunDirectory
from trimaran.runs.read.step_lines import read_details, read_step
from trimaran.ui.report.curves import DetailedStep
from trimaran.ui.report.detailed_steps import MARK, MAX_STEPS, detailed_steps


class DetailsFeed:
    """`steps` are the steps with details: at most `MAX_STEPS`, evenly spread, and those since the last thinning."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lines: LineFollower | None = None
        self.steps: list[DetailedStep] = []

    def refresh(self) -> bool:
        """Read what was appended, and return whether there was anything; the first call spreads over the file."""
        if self._lines is None:
            self._lines = LineFollower(self._run.metrics, backlog=0)
            self.steps = detailed_steps(self._run)
            return True
        before = self._lines.offset
        for line in self._lines.new():
            if MARK in line and (step := read_step(line)) is not None:
                while self.steps and self.steps[-1][0] >= step.step:  # a step that is repeated
                    self.steps.pop()
                self.steps.append((step.step, read_details(step.rest)))
        if len(self.steps) > 2 * MAX_STEPS:
            self.steps = self.steps[1::2]
        return self._lines.offset != before

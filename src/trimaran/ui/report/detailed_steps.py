"""The details of some steps, evenly spread over a run, without reading the lines in between."""

from collections.abc import Iterator
from typing import BinaryIO

from trimaran.core import open_regular_file
from trimaran.runs import RunDirectory, RunReader, StepLine, read_details, read_step
from trimaran.ui.report.curves import DetailedStep

MAX_STEPS = 800
MAX_FULLY_READ_BYTES = 4 << 20
MARK = b'"memory":'  # of lines with slow details, which most lines of a long run leave out
MAX_SKIPPED_LINES = 64  # without them, at one place
MAX_PART_BYTES = 1 << 20  # of a line that is read at one place


class DetailsFeed:
    """`steps` are the steps with details: at most `MAX_STEPS`, evenly spread, and those since the last thinning."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reader: RunReader | None = None
        self.steps: list[DetailedStep] = []

    def refresh(self) -> bool:
        """Read what was appended, and return whether there was anything; the first call spreads over the file."""
        if self._reader is None:
            self._reader = RunReader(self._run).follow(self._run.metrics, backlog=0)
            self.steps = detailed_steps(self._run)
            return True
        has_new = False
        for line in self._reader.lines(self._run.metrics):
            has_new = True
            if MARK in line and (step := read_step(line)) is not None:
                while self.steps and self.steps[-1][0] >= step.step:  # a step that is repeated
                    self.steps.pop()
                self.steps.append((step.step, read_details(step.rest)))
        if len(self.steps) > 2 * MAX_STEPS:
            self.steps = self.steps[1::2]
        return has_new


def detailed_steps(run: RunDirectory) -> list[DetailedStep]:
    """Return (step, details) of a short run's steps; of a long run, those of evenly spread steps."""
    try:
        with open_regular_file(run.metrics) as file:
            file.seek(0, 2)
            steps = _all(file) if file.tell() <= MAX_FULLY_READ_BYTES else list(_spread(file, file.tell()))
    except FileNotFoundError:
        return []
    found = {step.step: read_details(step.rest) for step in steps}  # the last line of a step that was repeated
    return sorted(found.items())


def _all(file: BinaryIO) -> list[StepLine]:
    file.seek(0)
    steps = [step for step in map(read_step, file) if step is not None]
    every = 1
    if len(steps) >= MAX_STEPS:
        steps = [step for step in steps if MARK in step.rest] or steps
    while len(steps) // every >= MAX_STEPS:
        every *= 2
    return steps[every - 1 :: every]


def _spread(file: BinaryIO, size: int) -> Iterator[StepLine]:
    for place in range(MAX_STEPS // 2):
        file.seek(place * size // (MAX_STEPS // 2))
        if place and not file.readline(MAX_PART_BYTES).endswith(b"\n"):  # the rest of a line
            continue  # a damaged one
        for _ in range(MAX_SKIPPED_LINES):
            line = file.readline(MAX_PART_BYTES)
            if MARK in line and (step := read_step(line)) is not None:
                yield step
                break

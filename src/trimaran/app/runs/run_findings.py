"""Polls the doctor's findings about a run for the live view, without disturbing the run."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from trimaran.core import Finding
from trimaran.runs import RunDirectory

POLL_SECONDS = 10.0
MAX_CPU_FRACTION = 0.05  # of a core that polling may take from the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """A finding and the command that applies its patch; empty if no setting fixes it."""

    finding: Finding
    command: str

    def as_dict(self) -> dict[str, Any]:
        return self.finding.as_dict() | {"command": self.command}


class RunDiagnosis(NamedTuple):
    """The doctor's findings, its own error, if any, and the targets that were measured."""

    findings: list[RunFinding]
    error: str = ""
    targets: Sequence[dict[str, Any]] = ()


def read_findings(run: RunDirectory) -> RunDiagnosis:
    """Return what the doctor says. Its own error is part of the answer: it must not disturb the live view."""
    try:
        from trimaran.app.runs.diagnosis import command_of
        from trimaran.doctor.diagnose import diagnose
        from trimaran.doctor.evidence import read_evidence
        from trimaran.doctor.targets import check_targets
        from trimaran.machine import calibration_folder

        with _captured_warnings("trimaran.doctor") as warnings:
            evidence = read_evidence(run, calibrations=calibration_folder(os.environ))
            found, targets = diagnose(evidence), check_targets(evidence)
        measured = [each.as_dict() | {"text": str(each)} for each in targets if each.is_met is not None]
        findings = [RunFinding(finding=each, command=command_of(each, run)) for each in found]
        return RunDiagnosis(findings, "; ".join(warnings), measured)
    except Exception as error:
        return RunDiagnosis([], f"the doctor failed: {type(error).__name__}: {error}")


@contextmanager
def _captured_warnings(name: str) -> Iterator[list[str]]:
    """Yield the warnings and errors of a logger instead of printing them: repeated tracebacks would hide the run."""
    logger, messages = logging.getLogger(name), []

    def emit(record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        messages.append(record.getMessage() + (f": {type(error).__name__}: {error}" if error else ""))

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class FindingsPoller:
    """Polls the doctor's findings about one run.

    It polls every ten seconds, or less often to use at most a twentieth of a core. It never raises: the process that
    shows a run may also be the one that started it. `read` asks the doctor.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        at_once: bool,
        read: Callable[[RunDirectory], RunDiagnosis] = read_findings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self._read, self._clock = run, read, clock
        self.findings: list[RunFinding] = []
        self.error = ""
        self.targets: Sequence[dict[str, Any]] = ()
        self._due = 0.0 if at_once else clock() + POLL_SECONDS
        self._shown: dict[tuple[str, str], bool] = {}  # by code and culprit: whether as a fault
        self._error_shown = False

    def poll(self) -> None:
        """Read the findings again if it is due."""
        began = self._clock()
        if began < self._due:
            return
        self.findings, self.error, self.targets = self._read(self.run)
        took = self._clock() - began
        self._due = began + max(POLL_SECONDS, took / MAX_CPU_FRACTION)

    def new_findings(self) -> list[RunFinding]:
        """Return each finding once, by code and culprit, and again if it has become a fault."""
        new = []
        for each in self.findings:
            key, is_fault = (each.finding.code, each.finding.culprit), each.finding.severity == "fault"
            if key not in self._shown or (is_fault and not self._shown[key]):
                self._shown[key] = is_fault
                new.append(each)
        return new

    def new_error(self) -> str:
        """Return the doctor's own error the first time there is one; otherwise an empty string."""
        if not self.error or self._error_shown:
            return ""
        self._error_shown = True
        return self.error

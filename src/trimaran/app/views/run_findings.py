"""What the doctor says about a run, for those who watch it: looked for now and then, and never in the way."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimaran.core import Finding
from trimaran.run import RunDirectory

LOOK_SECONDS = 10.0
MAX_SHARE = 0.05  # of a core that looking may take from the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFindings:
    """A finding and the command that applies its patch; empty where no setting mends it."""

    finding: Finding
    command: str

    def as_dict(self) -> dict[str, Any]:
        return self.finding.as_dict() | {"command": self.command}


def read_findings(run: RunDirectory) -> tuple[list[RunFindings], str]:
    """Return what the doctor finds now and what kept it from looking, if anything did: a run is shown all the same."""
    try:
        from trimaran.app.views.diagnosis import command_of
        from trimaran.doctor.diagnose import diagnose
        from trimaran.doctor.evidence import read_evidence
        from trimaran.hardware import calibration_folder

        with _overheard("trimaran.doctor") as troubles:
            found = diagnose(read_evidence(run, calibrations=calibration_folder(os.environ)))
        return [RunFindings(finding=each, command=command_of(each, run)) for each in found], "; ".join(troubles)
    except Exception as error:
        return [], f"the doctor could not look: {type(error).__name__}: {error}"


@contextmanager
def _overheard(name: str) -> Iterator[list[str]]:
    """Yield the warnings and errors that a logger is about to say: a traceback every ten seconds hides the run."""
    logger, said = logging.getLogger(name), []

    def hear(record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        said.append(record.getMessage() + (f": {type(error).__name__}: {error}" if error else ""))

    ear = logging.Handler(logging.WARNING)
    ear.emit = hear
    before, logger.propagate = logger.propagate, False
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
        logger.propagate = before


class Visits:
    """The doctor's visits to one run.

    Every ten seconds, and seldom enough that they take a twentieth of a core. Nothing that goes wrong in one is raised:
    whoever shows a run may also be who keeps it going.
    """

    def __init__(self, run: RunDirectory, *, at_once: bool) -> None:
        self.run = run
        self.told: list[RunFindings] = []
        self.trouble = ""
        self._due = 0.0 if at_once else time.monotonic() + LOOK_SECONDS
        self._shown: dict[tuple[str, str], bool] = {}  # by code and culprit: whether as a fault
        self._complained = False

    def look(self) -> None:
        """Look again if it is time to."""
        began = time.monotonic()
        if began < self._due:
            return
        self.told, self.trouble = read_findings(self.run)
        took = time.monotonic() - began
        self._due = began + max(LOOK_SECONDS, took / MAX_SHARE)

    def news(self) -> list[RunFindings]:
        """Return what was not returned before: each code and culprit once, and again when it has become a fault."""
        new = []
        for each in self.told:
            key, is_fault = (each.finding.code, each.finding.culprit), each.finding.severity == "fault"
            if key not in self._shown or (is_fault and not self._shown[key]):
                self._shown[key] = is_fault
                new.append(each)
        return new

    def new_trouble(self) -> str:
        """Return what kept the doctor from looking, the first time that something did; otherwise nothing."""
        if not self.trouble or self._complained:
            return ""
        self._complained = True
        return self.trouble

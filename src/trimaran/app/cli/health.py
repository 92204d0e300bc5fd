"""What the doctor says about a run, for those who watch it: looked for now and then, and never in the way."""

import time
from dataclasses import dataclass
from typing import Any

from trimaran.core import Finding
from trimaran.telemetry import RunDirectory
from trimaran.telemetry.ledger import Books, Ledger

LOOK_SECONDS = 10.0
MAX_SHARE = 0.05  # of a core that looking may take from the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A finding and the command that applies its patch; empty where no setting mends it."""

    finding: Finding
    command: str

    def as_dict(self) -> dict[str, Any]:
        return self.finding.as_dict() | {"command": self.command}


def read_findings(run: RunDirectory) -> tuple[list[Told], str]:
    """Return what the doctor finds now and, where it could not look, why: a view is drawn all the same."""
    from trimaran.app.cli.diagnosis import command_of
    from trimaran.doctor.diagnose import diagnose
    from trimaran.doctor.evidence import read_evidence

    try:
        found = diagnose(read_evidence(run))
        return [Told(finding=each, command=command_of(each, run)) for each in found], ""
    except Exception as error:
        return [], f"the doctor could not look: {type(error).__name__}: {error}"


class Visits:
    """The doctor's visits to one run, and the ledger of its time.

    Every ten seconds, and seldom enough that they take a twentieth of a core.
    """

    def __init__(self, run: RunDirectory, *, at_once: bool) -> None:
        self.run = run
        self.told: list[Told] = []
        self.trouble = ""
        self.ledger: Ledger | None = None
        self._books = Books(run)
        self._due = 0.0 if at_once else time.monotonic() + LOOK_SECONDS

    def look(self, *, now: float | None = None) -> None:
        """Look again if it is time to; `now` is for a run at work, see `Books.ledger`."""
        began = time.monotonic()
        if began < self._due:
            return
        self.told, self.trouble = read_findings(self.run)
        self.ledger = self._books.ledger(now=now)
        took = time.monotonic() - began
        self._due = began + max(LOOK_SECONDS, took / MAX_SHARE)

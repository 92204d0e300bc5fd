"""Looks after the run directory while a run is supervised: its reserve, unwritten lines, and whether it was moved."""

import time

from trimaran.runs import IncidentLog, RunDirectory
from trimaran.runs.attempts import AttemptLog
from trimaran.runs.held_directory import HeldDirectory
from trimaran.runs.reserve import fill_reserve, remove_reserve

POLL_SECONDS = 1.0


class DirectoryWatch:
    """Polled by the supervisor. `held` is its directory; None if files are opened by path, and moves go unnoticed."""

    def __init__(
        self, run: RunDirectory, incidents: IncidentLog, attempts: AttemptLog, *, held: HeldDirectory | None
    ) -> None:
        self._run, self._incidents, self._attempts, self.held = run, incidents, attempts, held
        self._due = 0.0

    def poll(self) -> None:
        """Write lines that could not be written before, and take the reserve back, if there is room again."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + POLL_SECONDS
        if not self.deleted:
            self._incidents.flush()
            self._attempts.flush()
            fill_reserve(self._run.reserve)

    @property
    def moved(self) -> str:
        """What happened to the directory if it was moved; empty if it was not."""
        return self.held.explain("moved") if self.held is not None and self.held.place == "moved" else ""

    @property
    def deleted(self) -> bool:
        return self.held is not None and self.held.place == "deleted"

    def end(self) -> None:
        """Write the last lines and delete the reserve: the run is over."""
        self._incidents.flush()
        self._attempts.flush()
        remove_reserve(self._run.reserve)

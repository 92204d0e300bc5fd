"""The incidents of a run: cause, ranks at fault, action and cost; the lines of `incidents.jsonl`."""

import time
from dataclasses import fields, replace
from typing import Any

from trimaran.core import Cause, Incident
from trimaran.runs.journal import JsonlFollower
from trimaran.runs.line_files import LineWriter
from trimaran.runs.run_directory import RunDirectory

_FIELDS = {each.name for each in fields(Incident)}
_NEEDED = {"id", "cause", "time", "what"}


class IncidentLog:
    """Writes the incidents of a run. Only one process may use it: the supervisor, or rank 0 where there is none.

    On a full disk it uses the run's reserve. What still cannot be written is kept, and written by a later call.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._writer = LineWriter(run.incidents, reserve=run.reserve)
        self._number = 0

    def notice(self, cause: Cause, what: str, **known: Any) -> Incident:
        """Write a new incident and return it. `known` are further fields of `Incident`."""
        self._number = number = max(self._number, len(read_incidents(self.run))) + 1
        incident = Incident(id=f"i-{number:04d}", cause=cause, time=time.time(), what=what, **known)
        self._write(incident)
        return incident

    def amend(self, incident: Incident, **changes: Any) -> Incident:
        """Write a changed incident and return it."""
        incident = replace(incident, **changes)
        self._write(incident)
        return incident

    def flush(self) -> None:
        """Write the incidents that could not be written before."""
        if self._writer.failure:
            self._writer.flush()
            self._writer.close()

    def _write(self, incident: Incident) -> None:
        self._writer.write(incident.as_dict())
        self._writer.close()  # incidents are rare


def read_incidents(run: RunDirectory) -> list[Incident]:
    """Return the incidents of a run, in order, each as it was last written."""
    incidents: dict[str, Incident] = {}
    for tree in JsonlFollower(run.incidents).new():
        if tree.keys() >= _NEEDED:
            incidents[tree["id"]] = _incident({key: tree[key] for key in _FIELDS & tree.keys()})
    return list(incidents.values())


def _incident(tree: dict[str, Any]) -> Incident:
    ranks: dict[str, Any] = {key: tuple(tree.get(key, ())) for key in ("suspects", "victims")}
    return Incident(**tree | ranks)

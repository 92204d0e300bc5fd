"""Remembers which incidents a sink has reported, so that a reopened sink does not report them twice.

Other lines reach a sink once. An incident is written again with its first time whenever more is known about it.
"""

import json
from pathlib import Path

from trimaran.core.regular_files import read_regular_text, write_atomically
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.sink import Line


class ReportedIncidents:
    """The incidents that a sink has reported, with the action they had then."""

    def __init__(self, run: RunDirectory, sink: str) -> None:
        self._path = run.path / "telemetry" / f"told-{sink}.json"
        self._keys = _read(self._path)

    def contains(self, incident: Line) -> bool:
        return _key(incident) in self._keys

    def add(self, incident: Line) -> None:
        """Mark the incident as reported, also for later sinks of this name."""
        self._keys.add(_key(incident))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(sorted(self._keys)) + "\n")


def _key(incident: Line) -> str:
    return f"{incident.get('id')} {incident.get('action')}"


def _read(path: Path) -> set[str]:
    """Return the reported incidents; empty if the file is missing or damaged."""
    try:
        tree = json.loads(read_regular_text(path))
    except (OSError, ValueError):
        return set()
    return {each for each in tree if isinstance(each, str)} if isinstance(tree, list) else set()

"""Which incidents a sink has told, so that one that is opened again does not tell them twice.

Other lines come to a sink once. An incident is a line again and again, as more becomes known, under its first time.
"""

import json
import os
from pathlib import Path

from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.sinks.sink import Line


class ReportedIncidents:
    """Knows what was said of incidents: that they happened, and what was done about them."""

    def __init__(self, run: RunDirectory, sink: str) -> None:
        self._path = run.path / "telemetry" / f"told-{sink}.json"
        self._keys = _read(self._path)

    def knows(self, incident: Line) -> bool:
        return _key(incident) in self._keys

    def add(self, incident: Line) -> None:
        """Take it as told, from now on and for who opens the sink again."""
        self._keys.add(_key(incident))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps(sorted(self._keys)) + "\n", encoding="utf-8")
        os.replace(draft, self._path)


def _key(incident: Line) -> str:
    return f"{incident.get('id')} {incident.get('action')}"


def _read(path: Path) -> set[str]:
    """Return what was told so far; nothing where the file is missing or is not one of ours."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {each for each in tree if isinstance(each, str)} if isinstance(tree, list) else set()

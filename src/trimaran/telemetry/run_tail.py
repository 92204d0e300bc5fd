"""Reads the lines that a run writes as one stream, for sinks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.run.journal import JsonlFollower
from trimaran.run.run_directory import RunDirectory

FOLDERS = (("event", "events", "rank-*.jsonl"), ("sample", "telemetry", "node-*.jsonl"))


class RunTail:
    """Follows the metrics, events, incidents and samples of a run, from where the previous sidecar stopped.

    `save_position` writes the time of the last line read, because every line has a time.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._position_file = run, run.path / "telemetry" / "fed.json"
        self._since = self._newest = self._read_position()
        self._followers: dict[Path, tuple[str, JsonlFollower]] = {}
        self._add("step", run.metrics)
        self._add("incident", run.incidents)

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name of the sink's method, line) of the lines written since the last call."""
        for kind, folder, pattern in FOLDERS:
            for path in sorted((self._run.path / folder).glob(pattern)):
                self._add(kind, path)
        for kind, follower in self._followers.values():
            for line in follower.new():
                written = line.get("time")
                if not isinstance(written, int | float) or (written <= self._since and kind != "incident"):
                    continue
                self._newest = max(self._newest, written)
                yield kind, line
        self._since = 0.0  # from now on every line is new, whatever the clocks of other nodes say

    def save_position(self) -> None:
        """Write how far the files were read, for the next sidecar."""
        self._position_file.parent.mkdir(exist_ok=True)
        draft = self._position_file.with_suffix(".tmp")
        draft.write_text(json.dumps({"time": self._newest}) + "\n", encoding="ascii")
        draft.replace(self._position_file)

    def _add(self, kind: str, path: Path) -> None:
        if path not in self._followers:
            self._followers[path] = kind, JsonlFollower(path)

    def _read_position(self) -> float:
        try:
            return float(json.loads(self._position_file.read_text(encoding="ascii"))["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

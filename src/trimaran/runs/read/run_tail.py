"""Reads the lines that a run writes as one stream, for sinks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import read_regular_text, write_atomically
from trimaran.runs.journal import LineFollower, parse_lines
from trimaran.runs.line_files import lines_from_end
from trimaran.runs.run_directory import RunDirectory

FOLDERS = (("event", "events", "rank-*.jsonl"), ("sample", "telemetry", "node-*.jsonl"))


class RunTail:
    """Follows the metrics, events, incidents and samples of a run, from where the previous sidecar stopped.

    `save_position` writes the time of the last line read, because every line has a time.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._position_file = run, run.path / "telemetry" / "fed.json"
        self._since = self._newest = self._read_position()
        self._followers: dict[Path, tuple[str, LineFollower]] = {}
        self._add("step", run.metrics)
        self._add("incident", run.incidents, is_whole=True)

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name of the sink's method, line) of the lines written since the last call."""
        for kind, folder, pattern in FOLDERS:
            for path in sorted((self._run.path / folder).glob(pattern)):
                self._add(kind, path)
        for kind, follower in self._followers.values():
            for line in parse_lines(follower.new()):
                written = line.get("time")
                if not isinstance(written, int | float) or (written <= self._since and kind != "incident"):
                    continue
                self._newest = max(self._newest, written)
                yield kind, line
        self._since = 0.0  # from now on every line is new, whatever the clocks of other nodes say

    def save_position(self) -> None:
        """Write how far the files were read, for the next sidecar."""
        self._position_file.parent.mkdir(exist_ok=True)
        write_atomically(self._position_file, json.dumps({"time": self._newest}) + "\n")

    def _add(self, kind: str, path: Path, *, is_whole: bool = False) -> None:
        if path not in self._followers:
            follower = LineFollower(path)
            if self._since and not is_whole:
                follower.skip_to(_first_after(self._since, path))
            self._followers[path] = kind, follower

    def _read_position(self) -> float:
        try:
            return float(json.loads(read_regular_text(self._position_file))["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0


def _first_after(since: float, path: Path) -> int:
    """Return the offset of the lines written after the time `since`: the file is read from its end up to them."""
    begin = 0
    for offset, line in lines_from_end(path):
        times = [record.get("time") for record in parse_lines([line])]
        if any(isinstance(each, int | float) and each <= since for each in times):
            return begin or offset + len(line)
        begin = offset
    return 0

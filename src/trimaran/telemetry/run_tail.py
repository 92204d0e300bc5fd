"""What a run writes, as one stream of lines for sinks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.run.journal import Follower
from trimaran.run.run_directory import RunDirectory

FOLDERS = (("event", "events", "rank-*.jsonl"), ("sample", "telemetry", "node-*.jsonl"))


class Tail:
    """Follows the metrics, events, incidents and samples of a run, from where the tail before this one has ended.

    That is known by the time of its last line, which `keep` writes down: lines carry one.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._mark = run, run.path / "telemetry" / "fed.json"
        self._since = self._newest = self._read_mark()
        self._followers: dict[Path, tuple[str, Follower]] = {}
        self._add("step", run.metrics)
        self._add("incident", run.incidents)

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what was written since the last look, each with the name of a sink's method."""
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
        self._since = 0.0  # what comes from now on is new, whatever the clocks of other machines say

    def keep(self) -> None:
        """Write down how far this was read, for the next one."""
        self._mark.parent.mkdir(exist_ok=True)
        draft = self._mark.with_suffix(".tmp")
        draft.write_text(json.dumps({"time": self._newest}) + "\n", encoding="ascii")
        draft.replace(self._mark)

    def _add(self, kind: str, path: Path) -> None:
        if path not in self._followers:
            self._followers[path] = kind, Follower(path)

    def _read_mark(self) -> float:
        try:
            return float(json.loads(self._mark.read_text(encoding="ascii"))["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

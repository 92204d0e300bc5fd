"""Follows the files of a run: everything that watches, diagnoses, steers or drills a run reads it here."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimaran.core import Decision, Incident, read_regular_text, write_atomically
from trimaran.runs.journal import LineFollower, LongLine, parse_lines
from trimaran.runs.line_files import lines_from_end
from trimaran.runs.read.step_lines import StepLine, read_step
from trimaran.runs.record_types import DAMAGED
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.run_records import Attempts, parse_decision, read_incidents


class RunReader:
    """Follows the files of one run. A call yields what was added to a file since the last one, and keeps none of it.

    `attempts` and `decisions` are those read so far. All steps of a long run are read with `LedgerReader`, which uses
    the index of the metrics.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.attempts = run, Attempts()
        self.decisions: dict[int, Decision] = {}
        self._followers: dict[Path, LineFollower] = {}
        self._incidents: list[Incident] = []
        self._incidents_version: tuple[int, int, int] | None = None

    def follow(self, *paths: Path, backlog: int | None = None) -> "RunReader":
        """Follow files from at most `backlog` bytes before their present ends. Others are read from their beginning."""
        for path in paths:
            self._followers.setdefault(path, LineFollower(path, backlog=backlog))
        return self

    def skip_to(self, path: Path, offset: int) -> None:
        """Read a file from `offset` on, where a line begins."""
        self.follow(path)._followers[path].skip_to(offset)

    def lines(self, path: Path) -> Iterator[bytes]:
        """Yield the new lines of a file."""
        return self.follow(path)._followers[path].new()

    def records(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the new records of a file of JSON lines. Damaged lines are skipped."""
        return parse_lines(self.lines(path))

    def steps(self) -> Iterator[StepLine]:
        return filter(None, map(read_step, self.lines(self.run.metrics)))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines of the metrics with all details, which takes much longer than `steps`."""
        return self.records(self.run.metrics)

    def events(self, rank: int = 0) -> Iterator[dict[str, Any]]:
        return self.records(self.run.events(rank))

    def read_attempts(self) -> bool:
        """Read the new lines, and return whether ranks were started since the last call."""
        before = len(self.attempts.attempts)
        for line in self.records(self.run.attempts):
            self.attempts.add(line)
        return len(self.attempts.attempts) > before

    def new_decisions(self) -> dict[int, Decision]:
        """Return the decisions that new lines are about, by id."""
        found = {}
        for line in self.lines(self.run.decisions):
            if (decision := parse_decision(line)) is not None:
                found[decision.id] = self.decisions[decision.id] = decision
        return found

    def incidents(self) -> list[Incident]:
        """Return all incidents, each as it was last written. The file is read again only if it has changed."""
        try:
            status = self.run.incidents.stat()
        except OSError:
            return self._incidents
        version = status.st_ino, status.st_size, status.st_mtime_ns
        if version != self._incidents_version:
            self._incidents_version, self._incidents = version, read_incidents(self.run)
        return self._incidents

    def long_lines(self, *paths: Path) -> list[LongLine]:
        """Return the lines of these files that were skipped because they are too long to be ours."""
        return [line for path in paths for line in self.follow(path)._followers[path].long_lines]


class RunTail:
    """Reads the metrics, events, incidents and samples of a run as one stream, from where the last sidecar stopped.

    `save_position` writes the time of the last line read, because every line has a time.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._reader, self._position_file = RunReader(run), run.path / "telemetry" / "fed.json"
        self._since = 0.0
        with suppress(*DAMAGED):
            self._since = float(json.loads(read_regular_text(self._position_file))["time"])
        self._newest = self._since
        self._kinds: dict[Path, str] = {}  # names of the sink's methods, by file
        self._add("step", run.metrics)
        self._kinds[run.incidents] = "incident"  # all of them, each time

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name of the sink's method, line) of the lines written since the last call."""
        for kind, folder, pattern in (("event", "events", "rank-*.jsonl"), ("sample", "telemetry", "node-*.jsonl")):
            for path in sorted((self._reader.run.path / folder).glob(pattern)):
                self._add(kind, path)
        for path, kind in self._kinds.items():
            for line in self._reader.records(path):
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

    def _add(self, kind: str, path: Path) -> None:
        if path not in self._kinds:
            self._kinds[path] = kind
            if self._since:
                self._reader.skip_to(path, _first_after(self._since, path))


def _first_after(since: float, path: Path) -> int:
    """Return the offset of the lines written after the time `since`: the file is read from its end up to them."""
    begin = 0
    for offset, line in lines_from_end(path):
        times = [record.get("time") for record in parse_lines([line])]
        if any(isinstance(each, int | float) and each <= since for each in times):
            return begin or offset + len(line)
        begin = offset
    return 0

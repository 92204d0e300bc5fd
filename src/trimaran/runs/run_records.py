"""The attempts, incidents, decisions and evaluations of a run, one JSON line each."""

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from trimaran.core import Cause, Decision, DecisionOutcome, Incident
from trimaran.runs.journal import read_json_lines, read_lines
from trimaran.runs.line_files import LineWriter
from trimaran.runs.record_types import is_count, is_number, is_time
from trimaran.runs.run_directory import RunDirectory

AttemptOutcome = Literal["done", "stopped", "trouble"]
_START_FIELDS = ("time", "world_size", "host", "pid")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the ranks. `ended` is None while they run; `step` is the last step that all ranks finished."""

    number: int
    time: float
    world_size: int
    host: str
    pid: int
    ended: float | None = None
    how: AttemptOutcome | None = None
    step: int = 0


class RareLines:
    """Writes lines that are far apart, so that their file is open only meanwhile.

    On a full disk it uses the run's reserve. What still cannot be written is kept, and written by a later call.
    """

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self.run, self._writer = run, LineWriter(path, reserve=run.reserve)

    def flush(self) -> None:
        """Write the lines that could not be written before."""
        if self._writer.failure:
            self._writer.flush()
            self._writer.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._writer.write(record)
        self._writer.close()


class AttemptLog(RareLines):
    """Writes the attempts of a supervisor."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run, run.attempts)
        self.count = len(read_attempts(run).attempts)

    def begin(self, *, world_size: int) -> int:
        """Write that ranks are being started, and return the number of this attempt."""
        number, self.count = self.count, self.count + 1
        here = {"host": platform.node(), "pid": os.getpid()}
        self._write({"attempt": number, "time": time.time(), "world_size": world_size} | here)
        return number

    def end(self, how: AttemptOutcome, *, step: int) -> None:
        """Write that the ranks of the last attempt are gone."""
        self._write({"attempt": self.count - 1, "ended": time.time(), "how": how, "step": step})

    def over(self, code: int, why: str) -> None:
        """Write that the supervisor ends with exit code `code`. Ranks start again only if the user resumes the run."""
        self._write({"over": code, "why": why, "time": time.time()})


class Attempts:
    """The attempts read so far. `over` is the exit code once a supervisor has ended, until another one starts."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.over: int | None = None
        self.why = ""
        self.over_time = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of the file."""
        if "over" in line:
            self.over, self.why, self.over_time = line["over"], line.get("why", ""), float(line.get("time", 0.0))
        elif "ended" in line and self.attempts:
            last = self.attempts[-1]
            last.ended, last.how, last.step = line["ended"], line.get("how"), line.get("step", 0)
        elif line.keys() >= {"attempt", *_START_FIELDS}:
            fields = {key: line[key] for key in _START_FIELDS}
            self.attempts.append(Attempt(number=line["attempt"], **fields))
            self.over, self.why = None, ""


def read_attempts(run: RunDirectory) -> Attempts:
    attempts = Attempts()
    for line in read_json_lines(run.attempts):
        attempts.add(line)
    return attempts


INCIDENT_FIELDS = {each.name for each in fields(Incident)}
INCIDENT_NEEDS = {"id", "cause", "time", "what"}


class IncidentLog(RareLines):
    """Writes the incidents of a run, from one process only: the supervisor, or rank 0 where there is none."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run, run.incidents)
        self._number = 0

    def notice(self, cause: Cause, what: str, **known: Any) -> Incident:
        """Write a new incident and return it. `known` are further fields of `Incident`."""
        self._number = number = max(self._number, len(read_incidents(self.run))) + 1
        incident = Incident(id=f"i-{number:04d}", cause=cause, time=time.time(), what=what, **known)
        self._write(incident.as_dict())
        return incident

    def amend(self, incident: Incident, **changes: Any) -> Incident:
        """Write a changed incident and return it."""
        incident = replace(incident, **changes)
        self._write(incident.as_dict())
        return incident


def read_incidents(run: RunDirectory) -> list[Incident]:
    """Return the incidents of a run, in order, each as it was last written."""
    incidents: dict[str, Incident] = {}
    for tree in read_json_lines(run.incidents):
        if tree.keys() >= INCIDENT_NEEDS:
            known = {key: tree[key] for key in INCIDENT_FIELDS & tree.keys()}
            known |= {key: tuple(tree.get(key, ())) for key in ("suspects", "victims")}
            incidents[tree["id"]] = Incident(**known)
    return list(incidents.values())


DECISION_FIELDS = {each.name for each in fields(Decision)}
DECISION_NEEDS = {"id", "time", "step", "patch", "undo", "outcome"}


def read_decisions(run: RunDirectory) -> list[Decision]:
    """Return the decisions of a run, in order, each as it was last written. Damaged lines are skipped."""
    decisions = filter(None, map(parse_decision, read_lines(run.decisions)))
    return list({each.id: each for each in decisions}.values())


def parse_decision(line: bytes | str) -> Decision | None:
    """Return the decision in a line of the file; None if the line is damaged."""
    tree = _object_of(line)
    if tree is None or not tree.keys() >= DECISION_NEEDS or not _has_types(tree):
        return None
    texts: dict[str, Any] = {name: str(tree.get(name) or "") for name in ("finding", "reason")}
    numbers = {name: _numbers(tree.get(name)) for name in ("expected", "baseline")}
    measured = None if tree.get("measured") is None else _numbers(tree["measured"])
    by = "user" if tree.get("by") == "user" else "autopilot"
    known: dict[str, Any] = {name: tree[name] for name in DECISION_FIELDS & tree.keys()}
    known.update(texts, **numbers, measured=measured, by=by)
    return Decision(**known)


def _has_types(tree: Mapping[str, Any]) -> bool:
    patches = all(isinstance(tree[name], dict) for name in ("patch", "undo"))
    counts = all(is_count(tree.get(name, 0)) for name in ("id", "step", "request"))
    return patches and counts and is_time(tree["time"]) and tree["outcome"] in get_args(DecisionOutcome)


def _numbers(tree: Any) -> dict[str, float]:
    return {name: value for name, value in tree.items() if is_number(value)} if isinstance(tree, dict) else {}


def read_evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations in the order in which they were made. Lines that are damaged are left out."""
    try:
        return [record for line in read_lines(run.evaluations) if (record := _object_of(line)) is not None]
    except OSError:
        return []


def _object_of(line: bytes | str) -> dict[str, Any] | None:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None

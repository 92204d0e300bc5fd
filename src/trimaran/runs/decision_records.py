"""Reads the decisions of the autopilot: a line of `decisions.jsonl` for each state of one; the last of an id counts."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from trimaran.core import Decision, DecisionOutcome
from trimaran.runs.journal import LineFollower
from trimaran.runs.record_types import is_count, is_number, is_time
from trimaran.runs.run_directory import RunDirectory

_FIELDS = {each.name for each in fields(Decision)}
_NEEDED = {"id", "time", "step", "patch", "undo", "outcome"}


def read_decisions(run: RunDirectory) -> list[Decision]:
    """Return the decisions of a run, in order, each as it was last written. Damaged lines are skipped."""
    return list(DecisionReader(run).new().values())


class DecisionReader:
    """Follows the decisions of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._lines = LineFollower(run.decisions)
        self.decisions: dict[int, Decision] = {}

    def new(self) -> dict[int, Decision]:
        """Read what was added since the last call, and return the decisions that it is about, by id."""
        found = {}
        for line in self._lines.new():
            if (decision := parse_decision(line)) is not None:
                found[decision.id] = self.decisions[decision.id] = decision
        return found


def parse_decision(line: bytes | str) -> Decision | None:
    """Return the decision in a line of the file; None if the line is damaged."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not tree.keys() >= _NEEDED or not _has_types(tree):
        return None
    texts: dict[str, Any] = {name: str(tree.get(name) or "") for name in ("finding", "reason")}
    numbers = {name: _numbers(tree.get(name)) for name in ("expected", "baseline")}
    measured = None if tree.get("measured") is None else _numbers(tree["measured"])
    by = "user" if tree.get("by") == "user" else "autopilot"
    known: dict[str, Any] = {name: tree[name] for name in _FIELDS & tree.keys()}
    known.update(texts, **numbers, measured=measured, by=by)
    return Decision(**known)


def _has_types(tree: Mapping[str, Any]) -> bool:
    patches = all(isinstance(tree[name], dict) for name in ("patch", "undo"))
    counts = all(is_count(tree.get(name, 0)) for name in ("id", "step", "request"))
    return patches and counts and is_time(tree["time"]) and tree["outcome"] in get_args(DecisionOutcome)


def _numbers(tree: Any) -> dict[str, float]:
    return {name: value for name, value in tree.items() if is_number(value)} if isinstance(tree, dict) else {}

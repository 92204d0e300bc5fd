"""Writes the decisions of a run: a line of `decisions.jsonl` for each state of one; the last of an id counts."""

from trimaran.core import Decision
from trimaran.runs import RunDirectory
from trimaran.runs.line_files import LineWriter


class DecisionLedger:
    """Writes the decisions of a run. Only one process may use it: the one that holds the autopilot's lock."""

    def __init__(self, run: RunDirectory) -> None:
        self._writer = LineWriter(run.decisions, reserve=run.reserve)

    def write(self, decision: Decision) -> None:
        self._writer.write(decision.as_dict())
        self._writer.close()  # decisions are minutes apart

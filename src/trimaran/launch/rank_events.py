"""Incidents from rank events that do not end the run: skipped updates, failed saves, damaged checkpoints."""

import re
from collections.abc import Iterable
from typing import Any

from trimaran.core import Action, Cause, Incident
from trimaran.run import IncidentLog

VARIABLE_PARTS = re.compile(r"[\w.,]*\d[\w.,]*( [KMG]?i?B)?")
"""Steps, temporary names and sizes in an error message. They differ each time while the reason is the same."""
ACTIONS = {"skip": "skipped", "rewind": "rewound"}  # `stop` ends the ranks, and becomes an incident there


class RankEventIncidents:
    """Files incidents for the events of one attempt. All ranks write the same events; only the first counts.

    `steps_before` is how many steps the run had finished before: those after an older checkpoint are lost.
    """

    def __init__(self, log: IncidentLog, *, attempt: int, steps_before: int = 0) -> None:
        self._log, self._attempt, self._steps_before = log, attempt, steps_before
        self._seen: set[tuple[str, int]] = set()
        self._failures: dict[str, Incident] = {}

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            kind, step, data = event["kind"], event.get("step", 0), event.get("data", {})
            if kind == "skip" and data.get("action") != "stop" and self._first(kind, step):
                self._skip(step, data)
            elif kind == "differ" and data.get("action") != "stop" and self._first(kind, step):
                action: Any = "rewound" if data.get("action") == "rewind" else "continued"
                self._file("numeric", data["message"], step, action, data, suspects=tuple(data["ranks"]))
            elif kind == "checkpoint" and self._first(kind, step):
                self._checkpoint(step, data)
            elif kind == "resume" and data.get("refused") and self._first(kind, step):
                what = f"a checkpoint is damaged and was not used: {_list_refused(data['refused'])}"
                incident = self._file("storage", what, step, "continued", {"refused": data["refused"]})
                self._log.amend(incident, cost={"lost_steps": max(0, self._steps_before - step)})

    def _first(self, kind: str, step: int) -> bool:
        is_first = (kind, step) not in self._seen
        self._seen.add((kind, step))
        return is_first

    def _skip(self, step: int, data: dict[str, Any]) -> None:
        ranks = tuple(data.get("ranks") or ())
        action: Any = ACTIONS.get(data.get("action", "skip"), "skipped")
        what = f"the update of step {step} was not applied: {data.get('reason', 'a value was not finite')}"
        self._file("numeric", what, step, action, data, suspects=ranks)

    def _checkpoint(self, step: int, data: dict[str, Any]) -> None:
        """File failed saves. Repeated failures for one reason are one incident with a count, until a save works."""
        if not data.get("failed"):
            self._failures.clear()
            return
        reason = VARIABLE_PARTS.sub("", data["failed"])
        if (known := self._failures.get(reason)) is None:
            what = f"the checkpoint of step {step} could not be saved: {data['failed']}"
            self._failures[reason] = self._file("storage", what, step, "continued", data)
            return
        again = {"count": known.evidence.get("count", 1) + 1, "last_step": step}
        what = f"{again['count']} checkpoints, of steps {known.step} to {step}, could not be saved: {data['failed']}"
        self._failures[reason] = self._log.amend(known, what=what, evidence=known.evidence | again)

    def _file(
        self,
        cause: Cause,
        what: str,
        step: int,
        action: Action,
        evidence: dict[str, Any],
        *,
        suspects: tuple[int, ...] = (),
    ) -> Incident:
        incident = self._log.notice(cause, what, attempt=self._attempt, step=step, suspects=suspects, evidence=evidence)
        return self._log.amend(incident, action=action)


def _list_refused(refused: list[dict[str, Any]]) -> str:
    return "; ".join(f"step {each['step']} ({each['tier']}): {each['why']}" for each in refused)

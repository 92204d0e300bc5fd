"""Ranks' events that are incidents, though the run goes on: refused updates, failed saves, damaged checkpoints."""

import re
from collections.abc import Iterable
from typing import Any

from trimaran.core import Action, Cause, Incident
from trimaran.run import IncidentLog

NUMBERS = re.compile(r"[\w.,]*\d[\w.,]*( [KMG]?i?B)?")
"""Steps, drafts and sizes: they are different every time, and the reason is the same."""
TOLD = {"skip": "skipped", "rewind": "rewound"}  # a stop ends the ranks, and is found there


class RankEventIncidents:
    """Files what the ranks of one attempt report. All of them see the same; the first who says it is heard.

    `had` is how many steps the run had done before: those that an older checkpoint lacks are lost.
    """

    def __init__(self, log: IncidentLog, *, attempt: int, had: int = 0) -> None:
        self._log, self._attempt, self._had = log, attempt, had
        self._heard: set[tuple[str, int]] = set()
        self._failures: dict[str, Incident] = {}

    def take(self, events: Iterable[dict[str, Any]]) -> None:
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
                what = f"a checkpoint was damaged and is not used: {_shown(data['refused'])}"
                incident = self._file("storage", what, step, "continued", {"refused": data["refused"]})
                self._log.amend(incident, cost={"lost_steps": max(0, self._had - step)})

    def _first(self, kind: str, step: int) -> bool:
        known = (kind, step) in self._heard
        self._heard.add((kind, step))
        return not known

    def _skip(self, step: int, data: dict[str, Any]) -> None:
        ranks = tuple(data.get("ranks") or ())
        action: Any = TOLD.get(data.get("action", "skip"), "skipped")
        what = f"the update of step {step} was not applied: {data.get('reason', 'its numbers were bad')}"
        self._file("numeric", what, step, action, data, suspects=ranks)

    def _checkpoint(self, step: int, data: dict[str, Any]) -> None:
        """A disk that fails again and again for the same reason is one incident that counts, until a save succeeds."""
        if not data.get("failed"):
            self._failures.clear()
            return
        reason = NUMBERS.sub("", data["failed"])
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


def _shown(refused: list[dict[str, Any]]) -> str:
    return "; ".join(f"step {each['step']} ({each['tier']}): {each['why']}" for each in refused)

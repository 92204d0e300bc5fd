"""The facts about a run in parts, each read again only if it has changed: for a page that follows a run for days.

`facts` is one JSON object, which `trimaran report --json` prints. A report reads every part once; a page asks for those
that it shows. Nothing is read twice: files are followed from where the last refresh stopped.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.app import ACTIVE_STATUSES, FindingsPoller, RunState, StepHistory
from trimaran.core import UserError
from trimaran.runs import RunDirectory
from trimaran.ui.report.curves import curves_of, phases_of, ranks_of
from trimaran.ui.report.part_facts import (
    about_facts,
    checkpoint_facts,
    ranks_now,
    state_facts,
    strict,
    view_facts,
)
from trimaran.ui.report.sparse_feeds import DetailsFeed, MachinesFeed
from trimaran.ui.report.step_pyramid import StepPyramid

Tree = dict[str, Any]
PARTS = ("about", "state", "curves", "phases", "details", "ranks", "checkpoints", "findings", "machines", "views")
SLOW_PARTS = ("findings", "machines", "views")  # whose first read takes long: a page shows the others before
STRICT = ("machines",)  # facts that are strict JSON already: lines of a file, and many
NEVER = object()


@dataclass(slots=True)
class FeedPart:
    """Some of the facts. They are read again when `key` returns another value; `version` counts that."""

    key: Callable[[], object]
    read: Callable[[], Tree]
    seen: object = NEVER
    version: int = 0


class RunFeed:
    """Follows one run. Threads may call it: one refreshes, and the others see the facts of before until it is done."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.facts = run, Tree()
        self.state = RunState(run)
        self._lock, self._slow_lock, self._facts_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._poller = FindingsPoller(run, at_once=True)
        self._details, self._machines = DetailsFeed(run), MachinesFeed(run)
        self._num_machine_reads = 0
        self._pyramid: StepPyramid | None = None
        self._pyramid_of: StepHistory | None = None
        state = self.state
        self._parts = {
            "about": FeedPart(lambda: state.plan, lambda: about_facts(state)),
            "state": FeedPart(self._state_key, lambda: state_facts(state)),
            "curves": FeedPart(self._curves_key, lambda: self._curves(state.history)),
            "phases": FeedPart(self._progress, lambda: {"phases_over_time": phases_of(state.history)}),
            "details": FeedPart(self._curves_key, lambda: {"ranks_over_time": ranks_of(self._details.steps)}),
            "ranks": FeedPart(self._ranks_key, lambda: {"ranks_now": ranks_now(state)}),
            "checkpoints": FeedPart(self._checkpoints_key, lambda: checkpoint_facts(state)),
            "findings": FeedPart(self._findings_key, self._findings),
            "machines": FeedPart(self._machines_key, lambda: {"machines_over_time": self._machines.spreads()}),
            "views": FeedPart(lambda: (state.plan, bool(state.steps), self.is_live), lambda: view_facts(run)),
        }

    def refresh(self, parts: Iterable[str] = PARTS) -> Tree:
        """Read what is new, and return the facts of these parts and of those that were read before."""
        wanted = list(parts)
        with self._lock:
            self.state.refresh()
            for name in wanted:
                if name not in SLOW_PARTS:
                    self._update(self._parts[name])
        for name in wanted:
            if name in SLOW_PARTS:
                with self._slow_lock:  # other pages need not wait for them
                    self._update(self._parts[name])
        return self.facts

    def _update(self, part: FeedPart) -> None:
        """Read a part again if it has changed."""
        if (key := part.key()) == part.seen:
            return
        found = {name: each if name in STRICT else strict(each) for name, each in part.read().items()}
        with self._facts_lock:
            self.facts = self.facts | found
        part.seen, part.version = key, part.version + 1

    def between(self, first: int, last: int) -> Tree:
        """Return the facts of part `curves` for the steps from `first` to `last`, in more detail than those of all."""
        with self._lock:
            if self._pyramid is None or self._pyramid_of is not self.state.history:  # steps were withdrawn
                self._pyramid, self._pyramid_of = StepPyramid(self.run), self.state.history
            self._pyramid.refresh()
            history = self._pyramid.history(first, last)
            return strict(self._curves(history, first, last) | {"phases_over_time": phases_of(history)})

    def _curves(self, history: StepHistory, first: int = 0, last: int = sys.maxsize) -> Tree:
        evaluations = [each for each in self.state.evaluations if first <= each[0] <= last]
        detailed = [each for each in self._details.steps if first <= each[0] <= last]
        return {"curves": curves_of(history, evaluations, detailed), "not_finite": history.not_finite}

    def is_read(self, part: str) -> bool:
        return self._parts[part].seen is not NEVER

    def versions(self, parts: Iterable[str]) -> tuple[int, ...]:
        """Return a value that changes whenever the facts of these parts do."""
        return tuple(self._parts[name].version for name in parts)

    @property
    def is_live(self) -> bool:
        return self.state.status in ACTIVE_STATUSES

    def _progress(self) -> tuple[object, ...]:
        history = self.state.history
        return history.count, self.state.step, len(self.state.events)

    def _state_key(self) -> object:
        state = self.state
        decisions = tuple((each.id, each.outcome) for each in state.decisions)
        times = tuple(sample.get("time") for sample in state.samples.values())
        moment = time.time() if self.is_live else 0.0  # the ledger of a live run ends now
        return state.status, self._progress(), state.incidents, decisions, times, moment

    def _curves_key(self) -> object:
        self._details.refresh()
        return self._progress()

    def _ranks_key(self) -> object:
        times = tuple(sample.get("time") for sample in self.state.samples.values())
        return self.state.status, len(self.state.events), times, _stamp(self.run.rank_table)

    def _checkpoints_key(self) -> object:
        return _stamp(self.run.checkpoints), len(self.state.events)

    def _machines_key(self) -> object:
        self._num_machine_reads += self._machines.refresh()
        return self._num_machine_reads

    def _findings_key(self) -> object:
        if self.is_live or self._parts["findings"].seen is NEVER:
            self._poller.poll()
        return self._poller.findings, self._poller.error

    def _findings(self) -> Tree:
        found = [each.as_dict() for each in self._poller.findings]
        return {"findings": found, "doctor_trouble": self._poller.error, "targets": [*self._poller.targets]}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return when a file or folder was changed; None if it does not exist."""
    try:
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    except OSError:
        return None


def read_range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon or not first.strip().isdecimal() or not last.strip().isdecimal() or int(first) > int(last):
        raise UserError("A042.not-range-steps", where="--steps", text=text[:40])
    return int(first), int(last)

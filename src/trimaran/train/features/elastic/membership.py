"""A rank's side of the rounds of elastic replicas: what it says to the supervisor, and what it waits for."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from trimaran.runs.replica_records import (
    FINISHED,
    LAST_ROUND,
    Round,
    RoundResult,
    Statement,
    lost_key,
    result_key,
    round_key,
    statement_key,
)
from trimaran.train.features.elastic.replica import Replica
from trimaran.train.process.supervisor_link import TIMED_OUT

WAIT = timedelta(seconds=1)  # for a key; then the rank reports that it is alive, and waits again


class Membership:
    """What this rank knows about the rounds. `rank` counts in the run. `report_alive` is called while it waits."""

    def __init__(
        self, store: dist.Store, replica: Replica, rank: int, *, start: int, report_alive: Callable[[], None]
    ) -> None:
        self._store, self.replica, self._rank, self._start = store, replica, rank, start
        self._report_alive = report_alive
        self._last = -1  # the last round whose result is known

    def has_begun(self) -> bool:
        """Return whether the others train already, so that this replica joins them."""
        return self._store.check([LAST_ROUND])

    def join(self, step: int) -> tuple[Round, RoundResult]:
        """Wait for a round in which this replica gets the state of another, or continues from its own of `step`."""
        self._say(Statement(kind="join", start=self._start, step=step))
        self._wait(LAST_ROUND)
        number = int(self._store.get(LAST_ROUND))
        while True:
            opened = Round.decode(self._wait(round_key(number)))
            if opened.starts.get(self.replica.number) == self._start:
                result = self.result_of(opened)
                if result.ok and self.replica.number in result.members:
                    return opened, result
            number += 1

    def next_round(self, step: int, *, stop: bool, leave: bool, save: bool, lines: list[list[float]]) -> Round:
        """Say that this rank has trained until `step`, and wait for the round."""
        self._say(Statement(kind="arrive", start=self._start, step=step, round=self._last, stop=stop,
                            leave=leave, save=save, lines=lines))  # fmt: skip
        return Round.decode(self._wait(round_key(self._last + 1)))

    def vote(self, opened: Round, *, ok: bool) -> RoundResult:
        """Say whether this rank has all values of the exchange, and wait until it is decided whether it counts."""
        self._say(Statement(kind="vote", start=self._start, step=opened.step, round=opened.number, ok=ok))
        return self.result_of(opened)

    def result_of(self, opened: Round) -> RoundResult:
        result = RoundResult.decode(self._wait(result_key(opened.number)))
        self._last = opened.number
        return result

    def is_over(self, opened: Round) -> bool:
        """Return whether the round is decided, so that nobody needs the exchange any more."""
        self._report_alive()
        return self._store.check([result_key(opened.number)])

    def is_lost(self, replica: int, opened: Round) -> bool:
        """Return whether a replica of a round is lost since."""
        self._report_alive()
        return self._store.check([lost_key(replica, opened.starts[replica])])

    def report_finished(self) -> None:
        """Say that the end of the run is saved."""
        self._store.set(FINISHED, "1")

    def is_finished(self, seconds: timedelta = WAIT) -> bool:
        """Return whether the end of the run is saved; wait a moment for it."""
        self._report_alive()
        return self._has(FINISHED, seconds)

    def _say(self, statement: Statement) -> None:
        self._store.set(statement_key(self._rank), statement.encode().decode())

    def _wait(self, key: str) -> bytes:
        self._report_alive()
        while not self._has(key, WAIT):
            self._report_alive()
        return self._store.get(key)

    def _has(self, key: str, seconds: timedelta) -> bool:
        """Return whether a key is set; wait for it this long."""
        try:
            self._store.wait([key], seconds)
        except dist.DistStoreError as error:
            if TIMED_OUT not in str(error):
                raise
            return False
        return True

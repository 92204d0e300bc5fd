"""Finds calls that only some of the ranks make, such as `loop.save` on the main rank alone, before they hang."""

import atexit
import json
import logging
import time
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trimaran.core import UserError
from trimaran.train.process.rank_info import TIMEOUT

log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
MAX_POLL_SECONDS = 0.1
WARN_SECONDS = 15.0
ENDED = "has reached the end of its script"
_numbers = count()


class CallOrder:
    """The calls that every rank must make, in one order. Each rank publishes its latest one in the ranks' store.

    `note` publishes a call and returns at once. `meet` also waits until every rank makes the same call. It raises if
    another rank has made a different one in its place: that rank will never arrive. A rank that is merely slow is
    waited for. Single ranks publish nothing.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self._store: Any = None
        if self.world_size > 1:
            self._store = dist.PrefixStore(f"trimaran/loop{next(_numbers)}", _get_default_store())
            atexit.register(self._leave)

    def note(self, call: str) -> None:
        """Publish a call that needs all ranks, without waiting for them."""
        if self._store is not None:
            self._number += 1
            self._store.set(f"last/{self.rank}", json.dumps([self._number, call]))

    def meet(self, call: str, *, fix: str) -> None:
        """Return when every rank has made this call. Raise UserError if one of them has made another instead."""
        if self._store is None:
            return
        self.note(call)
        key, started, pause, warned = f"meet/{self._number}/{call}", time.monotonic(), POLL_SECONDS, False
        if self._store.add(key, 1) == self.world_size:
            self._store.set(f"{key}/all", "")
        while not self._store.check([f"{key}/all"]):
            elapsed = time.monotonic() - started
            self._refuse_other_calls(call, f"{key}/all", fix)
            if elapsed > WARN_SECONDS and not warned:
                warned = True
                log.warning("rank %d has waited %.0f s in %s for rank(s) %s: does every rank call it?", self.rank,
                            elapsed, call, ", ".join(map(str, self._missing())))  # fmt: skip
            if elapsed > TIMEOUT.total_seconds():
                raise self._error(call, f"rank(s) {', '.join(map(str, self._missing()))} did not", fix)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _refuse_other_calls(self, call: str, all_met: str, fix: str) -> None:
        for rank, (number, other) in self._latest().items():
            is_other = number > self._number or (number == self._number and other != call)
            if is_other and not self._store.check([all_met]):  # a rank that was here may have gone on in the meantime
                instead = other if other == ENDED else f"made {other} in its place"
                raise self._error(call, f"rank {rank} {instead}", fix)

    def _error(self, call: str, others: str, fix: str) -> UserError:
        return UserError("P046", f"rank {self.rank} made {call}, which needs all ranks, but {others}",
                         where=call, fix=fix)  # fmt: skip

    def _latest(self) -> dict[int, tuple[int, str]]:
        """Return number and name of the latest call of every other rank that has made one."""
        others = [rank for rank in range(self.world_size) if rank != self.rank and self._store.check([f"last/{rank}"])]
        return {rank: tuple(json.loads(self._store.get(f"last/{rank}"))) for rank in others}

    def _missing(self) -> list[int]:
        latest = self._latest()
        return [
            rank for rank in range(self.world_size) if rank != self.rank and latest.get(rank, (0, ""))[0] < self._number
        ]

    def _leave(self) -> None:
        try:
            self.note(ENDED)
        except (RuntimeError, ValueError) as error:  # the store is gone when another rank has ended first
            log.debug("the end of rank %d was not published: %s", self.rank, error)

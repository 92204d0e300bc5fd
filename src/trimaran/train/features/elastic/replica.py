"""An elastic replica, its part in the rounds, and process groups between replicas.

A group is made for those who take part in a round, and given up if one of them is lost.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS, Plan, Recipe, UserError
from trimaran.data import data_kind_of
from trimaran.runs import Round, RoundResult, Statement, closed_listeners, lost_key, result_key, round_key
from trimaran.runs.replica_records import FINISHED, LAST_ROUND, statement_key
from trimaran.train.process.rank_setup import TIMEOUT, RankInfo
from trimaran.train.process.supervisor_link import TIMED_OUT, SupervisorLink, supervisor_store

FIELD = "plan.comm.local_steps.elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica of `size` ranks, one of `num`. Its ranks are neighbours: the first is `first_rank` of the run."""

    number: int
    num: int
    size: int

    @property
    def first_rank(self) -> int:
        return self.number * self.size

    def rank_info(self, of_run: RankInfo) -> RankInfo:
        rank = of_run.rank - self.first_rank
        return replace(of_run, rank=rank, world_size=self.size, local_rank=min(rank, of_run.local_rank))

    def plan(self, of_run: Plan) -> Plan:
        """Return the plan of this replica alone: its mesh, and its part of the global batch."""
        mesh = of_run.mesh.model_copy(update={"dp_replicate": 1})
        return of_run.model_copy(update={"mesh": mesh})

    def recipe(self, of_run: Recipe) -> Recipe:
        """Return a replica's recipe: no evaluation in its steps, no copies in memory (other replicas are copies)."""
        evaluate = of_run.train.evaluate.model_copy(update={"every": 0})
        train = of_run.train.model_copy(update={"evaluate": evaluate})
        checkpoint = of_run.checkpoint.model_copy(update={"memory": 0})
        return of_run.model_copy(update={"train": train, "checkpoint": checkpoint})


def replica_of(plan: Plan, rank: int) -> Replica:
    size = plan.mesh.world_size // plan.mesh.dp_replicate
    return Replica(number=rank // size, num=plan.mesh.dp_replicate, size=size)


def check_replica(recipe: Recipe, link: SupervisorLink) -> None:
    """Raise where elastic replicas cannot work."""
    what = fix = ""
    if not link.store:
        what = "elastic replicas need Trimaran's supervisor, which decides who takes part"
        fix = "start the run with `trimaran train` or `trimaran launch`, or leave out elastic"
    elif link.own_disk:
        what = "elastic replicas need a disk that all nodes share: another replica may save the checkpoint"
        fix = "use a shared disk, or leave out elastic"
    elif (kind := data_kind_of(recipe)) != "text":
        what, fix = f"elastic replicas train on text, not on {kind}", "leave out elastic"
    elif recipe.data.epochs:
        what = "data.epochs cannot be kept if replicas are lost: the steps that are left have fewer samples"
        fix = "set train.steps in place of data.epochs, or leave out elastic"
    if what:
        raise UserError("P003", what, where=FIELD, fix=fix)


def join_replica(replica: Replica, rank_info: RankInfo, link: SupervisorLink) -> None:
    """Initialise torch's default process group with the ranks of this replica. `rank_info` counts in the replica."""
    traits = DEVICE_TRAITS[rank_info.device.type]
    if traits.has_own_memory:
        torch.cuda.set_device(rank_info.device)
    prefix = f"replicas/world/{replica.number}/{link.replica_start}/"
    store = dist.PrefixStore(prefix, supervisor_store(link)) if replica.size > 1 else dist.HashStore()
    with closed_listeners():
        dist.init_process_group(
            traits.group_backends, store=store, rank=rank_info.rank, world_size=replica.size, timeout=TIMEOUT
        )


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
        self._report_alive()
        return self._store.check([lost_key(replica, opened.starts[replica])])

    def report_finished(self) -> None:
        self._store.set(FINISHED, "1")

    def is_finished(self) -> bool:
        """Return whether the end of the run is saved; wait a moment for it."""
        self._report_alive()
        return self._has(FINISHED, WAIT)

    def _say(self, statement: Statement) -> None:
        self._store.set(statement_key(self._rank), statement.encode().decode())

    def _wait(self, key: str) -> bytes:
        self._report_alive()
        while not self._has(key, WAIT):
            self._report_alive()
        return self._store.get(key)

    def _has(self, key: str, seconds: timedelta) -> bool:
        try:
            self._store.wait([key], seconds)
        except dist.DistStoreError as error:
            if TIMED_OUT not in str(error):
                raise
            return False
        return True


log = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_SECONDS = 0.2  # between two looks whether what runs is still needed
_abandoned: list[dist.ProcessGroup] = []  # gloo's destructor would wait for their collectives


def make_group(store: dist.Store, members: Sequence[int], member: int, *, prefix: str) -> dist.ProcessGroup:
    """Return a gloo group of one rank of each of `members`, which all call this with the same prefix.

    The default group has only the ranks of one replica, so this group is not one of its subgroups. Unlike NCCL's, it
    can be given up.
    """
    size, rank = len(members), list(members).index(member)
    inner = dist.PrefixStore(prefix, store) if size > 1 else dist.HashStore()
    group = dist.ProcessGroup(inner, rank, size)
    with closed_listeners():
        backend = dist.ProcessGroupGloo(inner, rank, size, TIMEOUT)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def abandon(group: dist.ProcessGroup) -> None:
    """Give up a group in which a collective may be running that never ends."""
    _abandoned.append(group)


def run_until(do: Callable[[], T], is_over: Callable[[], bool]) -> T | None:
    """Return the result of `do`, run in its own thread; None if it fails, or if `is_over` is true first.

    The thread is left behind then: a collective that waits for a lost rank cannot be interrupted.
    """
    results: list[T] = []

    def work() -> None:
        try:
            with torch.no_grad():
                results.append(do())
        except Exception as error:
            log.warning("the exchange with other replicas failed: %s", error)

    thread = threading.Thread(target=work, name="trimaran-exchange", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(CHECK_SECONDS)
        if thread.is_alive() and is_over():
            break
    return results[0] if results else None

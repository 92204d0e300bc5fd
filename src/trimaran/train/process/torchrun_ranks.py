"""The ranks that an outside torchrun starts: their machines are checked before they join, and they open one run."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.parallel.comm.json_exchange import broadcast_json
from trimaran.runs import RunDirectory
from trimaran.runs.held_directory import HeldDirectory
from trimaran.runs.lease import take_lease
from trimaran.runs.reserve import fill_reserve, remove_reserve
from trimaran.train.process.rank_setup import TIMEOUT, RankInfo, join_process_group
from trimaran.train.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)

READ_SECONDS = 10.0  # rank 0 waits this long for all ranks to read an error, since it may host the store


def check_machines(rank_info: RankInfo, check: Callable[[], None]) -> dist.Store | None:
    """Run `check` on the first rank of each machine; if it raises on one machine, raise its error on every rank.

    The ranks exchange errors through torchrun's store, since what is wrong with a machine may prevent it from joining
    the process group. Returns that store. Keep it until the ranks have joined: others may still read from rank 0's.
    """
    error: dict[str, Any] = {}
    if rank_info.local_rank == 0:
        try:
            check()
        except UserError as raised:
            error = raised.as_dict()
    if rank_info.world_size == 1:
        _raise(error)
        return None
    store, _, _ = next(dist.rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=TIMEOUT))
    _raise(_exchange(dist.PrefixStore("trimaran-preflight", store), rank_info, error))
    return store


def _exchange(store: dist.Store, rank_info: RankInfo, error: dict[str, Any]) -> dict[str, Any]:
    """Return, on every rank, the error that rank 0 merged from those of all ranks."""
    store.set(str(rank_info.rank), json.dumps(error))
    if rank_info.rank == 0:
        errors = [json.loads(each) for each in store.multi_get([str(rank) for rank in range(rank_info.world_size)])]
        store.set("all", json.dumps(_merge([each for each in errors if each])))
    merged = json.loads(store.get("all"))
    num_read = store.add("heard", 1)
    until = time.monotonic() + READ_SECONDS
    while merged and rank_info.rank == 0 and num_read < rank_info.world_size and time.monotonic() < until:
        time.sleep(0.02)
        num_read = store.add("heard", 0)
    return merged


def _merge(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first error, with the names of all machines that have the same one; empty without errors."""
    if not errors:
        return {}
    machines = [each["where"] for each in errors if each["what"] == errors[0]["what"]]
    return errors[0] | {"where": ", ".join(dict.fromkeys(machines))}


def _raise(error: dict[str, Any]) -> None:
    if error:
        raise UserError(**error)


@contextmanager
def open_torchrun_run(
    rank_info: RankInfo, make: Callable[[], RunDirectory], *, check: Callable[[], None] | None = None
) -> Iterator[tuple[RunDirectory, SupervisorLink]]:
    """Join the ranks that an outside torchrun started, and open on all of them the run that rank 0 makes or finds.

    Rank 0 holds the lease of the run, so that no other process can start it, and stops all ranks if the run directory
    is moved; there is no supervisor. `check` raises if the run cannot work on this machine, see `check_machines`.
    """
    store = check_machines(rank_info, check) if check else None
    join_process_group(rank_info)
    del store
    answer: dict[str, Any] = {}
    held: HeldDirectory | None = None
    with ExitStack() as lease_stack:
        if rank_info.rank == 0:
            try:
                held = HeldDirectory(make().path)
                answer = {"path": str(held.named), "term": lease_stack.enter_context(take_lease(held.run)).term}
                fill_reserve(held.run.reserve)
                lease_stack.callback(remove_reserve, held.run.reserve)
                held.watch(partial(_stop_in_moved_directory, held))
            except UserError as error:
                answer = error.as_dict()
        answer = broadcast_json(answer)
        if "code" in answer:
            raise UserError(answer["code"], answer["what"], where=answer["where"], fix=answer["fix"])
        held = held or HeldDirectory(Path(answer["path"]))
        yield held.run, SupervisorLink(term=answer["term"])


def _stop_in_moved_directory(held: HeldDirectory) -> None:
    """Stop all ranks as if the user had asked for it: the last checkpoint goes to where the directory is now."""
    log.error("%s; stopping", held.explain(held.place))
    os.kill(os.getpid(), signal.SIGTERM)

"""The ranks that an outside torchrun starts: their machines are checked before they join, and they open one run."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.parallel import broadcast_json
from trimaran.runs import HeldDirectory, RunDirectory, fill_reserve, remove_reserve, take_lease
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
    store: dist.Store | None = None
    if rank_info.world_size > 1:
        store, _, _ = next(dist.rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=TIMEOUT))
        shared = dist.PrefixStore("trimaran-preflight", store)
        shared.set(str(rank_info.rank), json.dumps(error))
        if rank_info.rank == 0:
            found = [json.loads(each) for each in shared.multi_get([str(rank) for rank in range(rank_info.world_size)])]
            errors = [each for each in found if each]
            first = errors[0] if errors else {}
            if errors:  # with the names of all machines that have the same one
                same = [each["where"] for each in errors if each["what"] == first["what"]]
                first |= {"where": ", ".join(dict.fromkeys(same))}
            shared.set("all", json.dumps(first))
        error = json.loads(shared.get("all"))
        num_read, until = shared.add("heard", 1), time.monotonic() + READ_SECONDS
        while error and rank_info.rank == 0 and num_read < rank_info.world_size and time.monotonic() < until:
            time.sleep(0.02)
            num_read = shared.add("heard", 0)
    if error:
        raise UserError(**error)
    return store


@contextmanager
def open_torchrun_run(
    rank_info: RankInfo, make: Callable[[], RunDirectory], *, check: Callable[[], None] | None = None
) -> Iterator[tuple[RunDirectory, SupervisorLink]]:
    """Join ranks of an outside torchrun, and open on all the run that rank 0 makes or finds, after `check`.

    Rank 0 holds the lease, and stops all ranks if the run directory is moved.
    """
    store = check_machines(rank_info, check) if check else None
    join_process_group(rank_info)
    del store
    answer: dict[str, Any] = {}
    held: HeldDirectory | None = None

    def stop_in_moved_directory() -> None:
        """Stop all ranks as if the user had asked for it: the last checkpoint goes to where the directory is now."""
        assert held is not None
        log.error("%s; stopping", held.explain(held.place))
        os.kill(os.getpid(), signal.SIGTERM)

    with ExitStack() as lease_stack:
        if rank_info.rank == 0:
            try:
                held = HeldDirectory(make().path)
                answer = {"path": str(held.named), "term": lease_stack.enter_context(take_lease(held.run)).term}
                fill_reserve(held.run.reserve)
                lease_stack.callback(remove_reserve, held.run.reserve)
                held.watch(stop_in_moved_directory)
            except UserError as error:
                answer = error.as_dict()
        answer = broadcast_json(answer)
        if "code" in answer:
            raise UserError(answer["code"], answer["what"], where=answer["where"], fix=answer["fix"])
        held = held or HeldDirectory(Path(answer["path"]))
        yield held.run, SupervisorLink(term=answer["term"])

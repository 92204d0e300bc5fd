"""Checks every machine of a torchrun job before its ranks join the process group."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.train.process.rank_info import TIMEOUT, RankInfo

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

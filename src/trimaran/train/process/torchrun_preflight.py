"""A look at every machine of the ranks that an outside torchrun started, before they join."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trimaran.core import UserError
from trimaran.train.process.rank_info import TIMEOUT, RankInfo

HEAR_SECONDS = 10.0  # that rank 0, which perhaps holds the store, waits until all have heard of a refusal


def look_together(place: RankInfo, look: Callable[[], None]) -> dist.Store | None:
    """Take `look` on the first rank of each machine, and raise on every rank what it raised on one of them.

    The ranks tell each other through torchrun's store: what ails a machine may be the very thing that keeps them from
    joining. Returns that store, to be held until they have joined, because others may still be reading from rank 0's.
    """
    found: dict[str, Any] = {}
    if place.local_rank == 0:
        try:
            look()
        except UserError as error:
            found = error.as_dict()
    if place.world_size == 1:
        _raise(found)
        return None
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=TIMEOUT))
    found = _hear_all(dist.PrefixStore("trimaran-look", store), place, found)
    _raise(found)
    return store


def _hear_all(store: dist.Store, place: RankInfo, found: dict[str, Any]) -> dict[str, Any]:
    """Return on every rank what rank 0 makes of what all have found."""
    store.set(str(place.rank), json.dumps(found))
    if place.rank == 0:
        told = [json.loads(each) for each in store.multi_get([str(rank) for rank in range(place.world_size)])]
        store.set("all", json.dumps(_together([each for each in told if each])))
    answer = json.loads(store.get("all"))
    heard = store.add("heard", 1)
    until = time.monotonic() + HEAR_SECONDS
    while answer and place.rank == 0 and heard < place.world_size and time.monotonic() < until:
        time.sleep(0.02)
        heard = store.add("heard", 0)
    return answer


def _together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first refusal, with the names of all machines that say the same; nothing where there is none."""
    if not told:
        return {}
    alike = [each["where"] for each in told if each["what"] == told[0]["what"]]
    return told[0] | {"where": ", ".join(dict.fromkeys(alike))}


def _raise(found: dict[str, Any]) -> None:
    if found:
        raise UserError(**found)

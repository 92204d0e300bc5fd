"""Process groups between elastic replicas: made for those who take part in a round, and given up if one is lost."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from trimaran.runs.gloo_listeners import closed_listeners
from trimaran.train.process.rank_info import TIMEOUT

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_SECONDS = 0.2  # between two looks whether what runs is still needed
_abandoned: list[dist.ProcessGroup] = []  # gloo's destructor would wait for their collectives


def make_group(store: dist.Store, members: Sequence[int], member: int, *, prefix: str) -> dist.ProcessGroup:
    """Return a gloo group of one rank of each of `members`, which all call this with the same prefix.

    It is not one of the default group's: that has the ranks of one replica only. It can be given up, unlike NCCL's.
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
    """Return what `do` returns in a thread of its own; None if it fails, or if `is_over` says so before.

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

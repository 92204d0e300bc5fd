"""The faults of a soak and how often they occur: modelled on the 419 unexpected interruptions of Llama 3 405B.

arXiv 2407.21783, table 5: GPU, HBM, SRAM and SoC 56 %, switches and cables 8 %, software 13 %, maintenance of hosts
8 %, and 15 % of many kinds, for which damaged storage, NaN values and a slow device stand here.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tests.chaos.fault_run import inject_fault
from tests.fault.harness import Supervised, wait_for
from trimaran.app import KINDS as DRILLS
from trimaran.app import DrillFault, FaultName, find_processes, inject
from trimaran.core import Cause

Inject = Callable[[Supervised, int], AbstractContextManager[object]]
SLOW_FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault: how many of 25 faults are of it, how it is injected into a rank, and its expected cause.

    The fault lasts until the end of the `with` block of `inject`. `restarts`: the supervisor ends as well and is
    started again. `names_rank`: the incident must name the rank.
    """

    name: str
    weight: int
    inject: Inject
    cause: Cause
    restarts: bool = False
    names_rank: bool = True


def drilled(name: FaultName) -> Inject:
    """Return a fault that `trimaran drill` injects."""

    def inject_drill(supervised: Supervised, rank: int) -> AbstractContextManager[object]:
        fault = DrillFault(kind=DRILLS[name], rank=rank, factor=SLOW_FACTOR)
        return inject(wait_for(lambda: find_processes(supervised.run)), fault)

    return inject_drill


def at_next_step(fault: str) -> Inject:
    """Return a fault that the rank runs into at its next step; see `plugin`."""

    @contextmanager
    def inject_once(supervised: Supervised, rank: int) -> Iterator[None]:
        inject_fault(supervised, rank, fault)
        yield

    return inject_once


KINDS = (
    Kind(name="device lost: kill -9", weight=9, inject=drilled("kill"), cause="crash"),
    Kind(name="device fault: abort()", weight=5, inject=at_next_step("abort"), cause="crash"),
    Kind(name="network: SIGSTOP", weight=2, inject=drilled("stop"), cause="hang"),
    Kind(name="software: exception", weight=3, inject=at_next_step("raise"), cause="crash"),
    Kind(
        name="maintenance: SIGTERM, resume",
        weight=2,
        inject=drilled("terminate"),
        cause="preempted",
        restarts=True,
        names_rank=False,
    ),
    Kind(
        name="storage: bit flip, host lost",
        weight=2,
        inject=drilled("damage-checkpoint"),
        cause="storage",
        restarts=True,
        names_rank=False,
    ),
    Kind(name="values: NaN on one rank", weight=1, inject=at_next_step("nan"), cause="numeric"),
    Kind(name="slow device", weight=1, inject=drilled("slow"), cause="straggler"),
)


def draw_kinds(generator: random.Random) -> Iterator[Kind]:
    """Yield kinds forever, shuffled, with the weights above in every 25 faults."""
    while True:
        deck = [kind for kind in KINDS for _ in range(kind.weight)]
        generator.shuffle(deck)
        yield from deck


def wait_until(moment: float) -> None:
    """Return at `moment` of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))

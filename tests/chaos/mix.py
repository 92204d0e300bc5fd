"""The faults of a soak and how often they occur: modelled on the 419 unexpected interruptions of Llama 3 405B.

arXiv 2407.21783, table 5: GPU, HBM, SRAM and SoC 56 %, switches and cables 8 %, software 13 %, maintenance of hosts
8 %, and 15 % of many kinds, for which damaged storage, NaN values and a slow device stand here.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.fault_run import inject_fault
from tests.fault.harness import Supervised
from trimaran.checkpoint.step_dirs import complete_steps
from trimaran.core import Cause

Inject = Callable[[Supervised, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault: how many of 25 faults are of it, how it is injected into a rank, and its expected cause.

    `restarts`: the supervisor ends as well and is started again.
    """

    name: str
    weight: int
    inject: Inject
    cause: Cause
    restarts: bool = False


def send(number: signal.Signals) -> Inject:
    return lambda supervised, rank: os.kill(supervised.pid(rank), number)


def at_next_step(fault: str) -> Inject:
    """Return a fault that the rank runs into at its next step; see `plugin`."""
    return lambda supervised, rank: inject_fault(supervised, rank, fault)


def stop(supervised: Supervised, rank: int) -> None:
    supervised.process.terminate()


def damage_and_kill(supervised: Supervised, rank: int) -> None:
    """Flip a bit of the newest checkpoint, and kill all processes, with their copies in memory."""
    folder = supervised.run.checkpoints / f"step-{complete_steps(supervised.run.checkpoints)[-1]:08d}"
    file = max(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    supervised.process.kill()


KINDS = (
    Kind(name="device lost: kill -9", weight=9, inject=send(signal.SIGKILL), cause="crash"),
    Kind(name="device fault: abort()", weight=5, inject=at_next_step("abort"), cause="crash"),
    Kind(name="network: SIGSTOP", weight=2, inject=send(signal.SIGSTOP), cause="hang"),
    Kind(name="software: exception", weight=3, inject=at_next_step("raise"), cause="crash"),
    Kind(name="maintenance: SIGTERM, resume", weight=2, inject=stop, cause="preempted", restarts=True),
    Kind(
        name="storage: bit flip, host lost",
        weight=2,
        inject=damage_and_kill,
        cause="storage",
        restarts=True,
    ),
    Kind(name="values: NaN on one rank", weight=1, inject=at_next_step("nan"), cause="numeric"),
    Kind(name="slow device: 5 s", weight=1, inject=at_next_step("slow"), cause="straggler"),
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

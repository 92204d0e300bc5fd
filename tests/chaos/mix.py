"""What goes wrong in a soak, and how often: modelled on the 419 unexpected interruptions of Llama 3 405B.

arXiv 2407.21783, table 5: GPU, HBM, SRAM and SoC 56 %, switches and cables 8 %, software 13 %, maintenance of hosts
8 %, and 15 % of many kinds, for which damaged storage, numbers that are none and a slow device stand here.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.fault_run import order
from tests.fault.harness import Supervised
from trimaran.checkpoint.step_dirs import steps
from trimaran.core import Cause

Strike = Callable[[Supervised, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault: how many of 25 faults are of it, how a rank is struck, and what Trimaran should call it.

    `restarts`: the supervisor ends as well and is started again.
    """

    name: str
    cards: int
    strike: Strike
    cause: Cause
    restarts: bool = False


def send(number: signal.Signals) -> Strike:
    return lambda sailing, rank: os.kill(sailing.pid(rank), number)


def told(fault: str) -> Strike:
    """Return a strike that has the rank break by itself, at its next step; see `plugin`."""
    return lambda sailing, rank: order(sailing, rank, fault)


def end(sailing: Supervised, rank: int) -> None:
    sailing.process.terminate()


def damage_and_lose(sailing: Supervised, rank: int) -> None:
    """Flip a bit of the newest checkpoint, and lose the machine's memory with all of its processes."""
    folder = sailing.run.checkpoints / f"step-{steps(sailing.run.checkpoints)[-1]:08d}"
    file = max(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    sailing.process.kill()


KINDS = (
    Kind(name="device lost: kill -9", cards=9, strike=send(signal.SIGKILL), cause="crash"),
    Kind(name="device fault: abort()", cards=5, strike=told("abort"), cause="crash"),
    Kind(name="network: SIGSTOP", cards=2, strike=send(signal.SIGSTOP), cause="hang"),
    Kind(name="software: exception", cards=3, strike=told("raise"), cause="crash"),
    Kind(name="maintenance: SIGTERM, resume", cards=2, strike=end, cause="preempted", restarts=True),
    Kind(
        name="storage: bit flip, host lost",
        cards=2,
        strike=damage_and_lose,
        cause="storage",
        restarts=True,
    ),
    Kind(name="numbers: NaN on one rank", cards=1, strike=told("nan"), cause="numeric"),
    Kind(name="slow device: 5 s", cards=1, strike=told("slow"), cause="straggler"),
)


def deal(chance: random.Random) -> Iterator[Kind]:
    """Yield kinds for ever, in the shares above, shuffled: every 25 faults all kinds have come."""
    while True:
        deck = [kind for kind in KINDS for _ in range(kind.cards)]
        chance.shuffle(deck)
        yield from deck


def wait_until(moment: float) -> None:
    """Return at `moment` of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))

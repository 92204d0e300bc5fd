"""More that breaks inside a rank, beside `tests.fault.plugin`: numbers, weights, samples, memory, disks, pace.

What is in the file `strike-RANK` of the run directory happens to that rank at its next step, once: that is how a test
that is under way strikes from outside. With the file `hurry` there, steps take no longer than they must.
"""

import ctypes
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fault import plugin
from trimaran.checkpoint.durable import DurableDisk
from trimaran.data.sequences import Sequences, TokenSample
from trimaran.nets import Network
from trimaran.nets.local_shards import local_part
from trimaran.run import Section
from trimaran.train import build
from trimaran.train.health import replica_check
from trimaran.train.process.supervisor_link import SupervisorLink

RUN = Path(sys.argv[1])
SLOW_SECONDS = 5.0
ROOM_BYTES = 64 << 20


@dataclass
class Mischief:
    """What happens to the numbers of the step at hand, and until when steps are slow."""

    output: Callable[[Tensor], Tensor] | None = None
    gradient: Callable[[Tensor], Tensor] | None = None
    slow_until: float = 0.0
    networks: tuple[Network, ...] = ()


mischief = Mischief()


def _regex_bomb() -> None:
    """Hold the interpreter for hours: `re` gives it up to nobody."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _native_deadlock() -> None:
    """Lock a mutex twice without giving up the interpreter, as C++ code with a bug does."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _fill_memory() -> None:
    """Ask for more than the limit on this process allows."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    torch.zeros(4 * ROOM_BYTES)


def _hoard() -> None:
    """Fill memory until the kernel puts an end to it."""
    kept = []
    for _ in range(32):
        kept.append(torch.ones(ROOM_BYTES // 4))
    time.sleep(60)


def _flip_a_bit() -> None:
    """Change one bit of one weight, as a device that lies does."""
    weight = next(iter(mischief.networks[0].module.parameters()))
    local_part(weight).detach().view(torch.int32).view(-1)[0] ^= 1 << 20


def _be_slow() -> None:
    mischief.slow_until = time.monotonic() + SLOW_SECONDS


def _spoil(**what: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def plant() -> None:
        for name, change in what.items():
            setattr(mischief, name, change)

    return plant


plugin.FAULTS |= {
    "regex": _regex_bomb,
    "deadlock": _native_deadlock,
    "memory": _fill_memory,
    "hoard": _hoard,
    "flip": _flip_a_bit,
    "slow": _be_slow,
    "nan": _spoil(output=lambda out: out * math.nan),
    "inf": _spoil(output=lambda out: out * math.inf),
    "gradient": _spoil(gradient=lambda gradient: gradient * math.nan),
    "spike": _spoil(output=lambda out: out * 1000.0),
    "barrier": dist.barrier,
    "shape": lambda: dist.all_reduce(torch.zeros(7)),
}
plain_enter, build_networks = SupervisorLink.enter, build.build_networks


def enter(self: SupervisorLink, section: Section, at: int = 0) -> None:
    if section in ("first", "step"):
        mischief.output = mischief.gradient = None
        plugin.pause = 0.0 if (RUN / "hurry").exists() else float(os.environ.get("TRIMARAN_TEST_PAUSE", "0"))
        if time.monotonic() < mischief.slow_until:
            time.sleep(2 * plugin.pause)
    plain_enter(self, section, at)
    letter = RUN / f"strike-{os.environ['RANK']}"
    if section == "step" and letter.exists():
        fault = letter.read_text()
        letter.unlink()
        plugin.FAULTS[fault]()


def spoil(module: torch.nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> Any:
    if not module.training or (mischief.output is None and mischief.gradient is None):
        return out
    logits = mischief.output(out[0]) if mischief.output else out[0]
    if mischief.gradient:
        logits.register_hook(mischief.gradient)
    return logits, out[1]


def build_with_hook(*args: Any) -> tuple[Network, ...]:
    mischief.networks = build_networks(*args)
    mischief.networks[-1].module.register_forward_hook(spoil)
    return mischief.networks


SupervisorLink.enter = enter  # type: ignore[method-assign]
build.build_networks = build_with_hook

if seconds := float(os.environ.get("TRIMARAN_TEST_DISK_SECONDS", "0")):
    sync = DurableDisk.sync

    def sync_slowly(self: DurableDisk, fd: int) -> None:
        time.sleep(seconds)
        sync(self, fd)

    DurableDisk.sync = sync_slowly  # type: ignore[method-assign]

if every := int(os.environ.get("TRIMARAN_TEST_COMPARE", "0")):
    replica_check.ReplicaCheck.__init__.__kwdefaults__["every"] = every

if poison := os.environ.get("TRIMARAN_TEST_SAMPLE"):  # KIND:ID, the kinds being raise, shape and range
    kind, number = poison.split(":")
    read = Sequences.__getitem__

    def read_poisoned(self: Sequences, index: int) -> TokenSample:
        sample = read(self, index)
        if self.first + index != int(number):
            return sample
        if kind == "raise":
            raise ValueError("a planted sample that cannot be read")
        tokens = sample.tokens[:-1] if kind == "shape" else sample.tokens + 10_000
        return replace(sample, tokens=tokens)

    Sequences.__getitem__ = read_poisoned  # type: ignore[method-assign]

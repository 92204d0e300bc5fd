"""More faults inside a rank, beside `tests.fault.plugin`: values, weights, samples, memory, disks, slow steps.

A rank runs into the fault named in the file `fault-RANK` of the run directory at its next step, once. A test writes it
to inject a fault into a running run.
"""

import ctypes
import math
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fault import plugin
from tests.fault.plugin import RUN
from trimaran.checkpoint import DurableDisk
from trimaran.data import Sequences, TokenSample
from trimaran.nets import Network, local_part
from trimaran.runs import Section
from trimaran.train import PlainStepper, SupervisorLink, build
from trimaran.train.health import memory_check

SLOW_SECONDS = 5.0
FREE_BYTES = 64 << 20


@dataclass
class InjectedFaults:
    """Changes to the values of the current step, and until when steps are slow."""

    output: Callable[[Tensor], Tensor] | None = None
    gradient: Callable[[Tensor], Tensor] | None = None
    slow_until: float = 0.0
    networks: tuple[Network, ...] = ()


injected = InjectedFaults()


def _regex_bomb() -> None:
    """Hold the GIL for hours: `re` never releases it."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _native_deadlock() -> None:
    """Lock a mutex twice while holding the GIL, as C++ code with a bug does."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _fill_memory() -> None:
    """Allocate more than the limit of this process allows."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + FREE_BYTES, used + FREE_BYTES))
    torch.zeros(4 * FREE_BYTES)


def _exhaust_memory() -> None:
    """Fill memory until the OOM killer kills this process."""
    kept = []
    for _ in range(32):
        kept.append(torch.ones(FREE_BYTES // 4))
    time.sleep(60)


def _flip_a_bit() -> None:
    """Flip one bit of one weight, as silent data corruption does."""
    weight = next(iter(injected.networks[0].module.parameters()))
    local_part(weight).detach().view(torch.int32).view(-1)[0] ^= 1 << 20


def _slow_down() -> None:
    injected.slow_until = time.monotonic() + SLOW_SECONDS


def _change(**changes: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def inject() -> None:
        for name, change in changes.items():
            setattr(injected, name, change)

    return inject


plugin.FAULTS |= {
    "regex": _regex_bomb,
    "deadlock": _native_deadlock,
    "memory": _fill_memory,
    "exhaust": _exhaust_memory,
    "flip": _flip_a_bit,
    "slow": _slow_down,
    "nan": _change(output=lambda out: out * math.nan),
    "inf": _change(output=lambda out: out * math.inf),
    "gradient": _change(gradient=lambda gradient: gradient * math.nan),
    "spike": _change(output=lambda out: out * 1000.0),
    "barrier": dist.barrier,
    "shape": lambda: dist.all_reduce(torch.zeros(7)),
}
report_section, build_networks = SupervisorLink.report_section, build.build_networks


def report_section_and_fail(self: SupervisorLink, section: Section, at: int = 0) -> None:
    if section in ("first", "step"):
        injected.output = injected.gradient = None
        if time.monotonic() < injected.slow_until:
            time.sleep(2 * plugin.pause_seconds())
    report_section(self, section, at)
    file = RUN / f"fault-{os.environ['RANK']}"
    if section == "step" and file.exists():
        fault = file.read_text()
        file.unlink()
        plugin.FAULTS[fault]()


def change_output(module: torch.nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> Any:
    if not module.training or (injected.output is None and injected.gradient is None):
        return out
    logits = injected.output(out[0]) if injected.output else out[0]
    if injected.gradient:
        logits.register_hook(injected.gradient)
    return logits, out[1]


def build_with_hook(*args: Any) -> tuple[Network, ...]:
    injected.networks = build_networks(*args)
    injected.networks[-1].module.register_forward_hook(change_output)
    return injected.networks


SupervisorLink.report_section = report_section_and_fail  # type: ignore[method-assign]
build.build_networks = build_with_hook  # pyrefly: ignore[bad-assignment]

if seconds := float(os.environ.get("TRIMARAN_TEST_DISK_SECONDS", "0")):
    sync = DurableDisk.sync

    def sync_slowly(self: DurableDisk, fd: int) -> None:
        time.sleep(seconds)
        sync(self, fd)

    DurableDisk.sync = sync_slowly  # type: ignore[method-assign]

if export_seconds := float(os.environ.get("TRIMARAN_TEST_EXPORT_SECONDS", "0")):  # for each tensor
    export_hf = import_module("trimaran.checkpoint.convert.export_hf")
    all_tensors = export_hf.all_tensors

    def yield_slowly(*args: Any) -> Iterator[tuple[str, Tensor]]:
        for each in all_tensors(*args):
            time.sleep(export_seconds)
            yield each

    export_hf.all_tensors = yield_slowly  # type: ignore[attr-defined]

if batch_seconds := float(os.environ.get("TRIMARAN_TEST_EVALUATION_SECONDS", "0")):  # for each batch
    evaluate = PlainStepper.evaluate

    def evaluate_slowly(self: PlainStepper, batch: Any) -> Tensor:
        time.sleep(batch_seconds)
        return evaluate(self, batch)

    PlainStepper.evaluate = evaluate_slowly  # type: ignore[method-assign]

if every := int(os.environ.get("TRIMARAN_TEST_COMPARE", "0")):
    defaults = memory_check.ReplicaCheck.__init__.__kwdefaults__
    assert defaults is not None
    defaults["every"] = every

if bad_sample := os.environ.get("TRIMARAN_TEST_SAMPLE"):  # KIND:ID, the kinds being raise, shape and range
    kind, number = bad_sample.split(":")
    read = Sequences.__getitem__

    def read_with_fault(self: Sequences, index: int) -> TokenSample:
        sample = read(self, index)
        if self.first + index != int(number):
            return sample
        if kind == "raise":
            raise ValueError("an injected sample that cannot be read")
        tokens = sample.tokens[:-1] if kind == "shape" else sample.tokens + 10_000
        return replace(sample, tokens=tokens)

    Sequences.__getitem__ = read_with_fault  # type: ignore[method-assign]

"""NVTX ranges of a rank: its steps, phases, layers and collectives, for Nsight Systems and other tools that read them.

A tool that is attached to the process receives them; without one a range costs the call. While they are off nothing is
installed. `docs/guides/nsight.md` says what each range means.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trimaran.core import Phase, UserError
from trimaran.core.device_traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.train.metrics.collective_ranges import CollectiveRanges
from trimaran.train.metrics.layer_ranges import LayerRanges
from trimaran.train.metrics.step_clock import NextPhase, StepClock

FIRST_PHASE = "data"  # of a step


class NvtxCalls(NamedTuple):
    """The calls that open and close a range on the calling thread. Ranges of a thread nest."""

    push: Callable[[str], Any]
    pop: Callable[[], Any]


def find_nvtx() -> NvtxCalls:
    """Return NVTX's calls: torch's, or on torch without CUDA those of the package `nvtx`. Raises UserError."""
    if hasattr(torch._C, "_nvtx"):
        return NvtxCalls(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ModuleNotFoundError:
        raise UserError("D017", "NVTX ranges need the package 'nvtx': this torch was built without CUDA",
                        where="telemetry.nvtx", fix="install it: pip install nvtx") from None  # fmt: skip
    return NvtxCalls(nvtx.push_range, nvtx.pop_range)


class StepRanges:
    """The ranges of this rank. On the thread that trains: a step, in it one phase at a time, in that the rest."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._calls = clock, find_nvtx()
        self._layers, self._collectives = LayerRanges(*self._calls), CollectiveRanges(*self._calls)
        self._listening = contextlib.ExitStack()
        self._networks: tuple[Network, ...] = ()
        self._phase = ""  # the open one; empty while nothing is installed

    def follow(self, networks: Sequence[Network]) -> None:
        """Show the blocks of these networks from now on."""
        self._networks = tuple(networks)
        if self._phase:
            self._layers.remove()
            self._layers.install(self._networks)

    def install(self, step: int) -> None:
        """Begin with this step, which is about to start."""
        self._layers.install(self._networks)
        self._collectives.install()
        self._listening.callback(self._clock.listen(self))
        self._open(step)

    def remove(self) -> None:
        """Close all ranges, between two steps, and remove what `install` installed. Without it, do nothing."""
        if not self._phase:
            return
        self._close()
        self._listening.close()
        self._collectives.remove()
        self._layers.remove()

    def begin_step(self, step: int) -> None:
        """End the open step and begin this one, if ranges are installed."""
        if self._phase:
            self._close()
            self._open(step)

    def enter(self, phase: NextPhase) -> None:
        """End the open phase and begin this one."""
        if phase != self._phase:
            self._calls.pop()
            self._calls.push(phase)
            self._phase = phase

    def end_lap(self, phase: Phase | None) -> None:
        """Do nothing: the range of a phase may have several laps."""

    def begin_span(self, phase: Phase, axis: str, stage: int | None) -> None:
        """Open a range inside the phase, on this thread."""
        self._calls.push(f"{phase} {axis if stage is None else stage}")

    def end_span(self, phase: Phase | None) -> None:
        self._calls.pop()

    def _open(self, step: int) -> None:
        self._calls.push(f"step {step}")
        self._calls.push(FIRST_PHASE)
        self._phase = FIRST_PHASE

    def _close(self) -> None:
        self._calls.pop()
        self._calls.pop()
        self._phase = ""

    @staticmethod
    def start_capture(device: torch.device) -> None:
        """Have a tool that waits for it record from now on: `cudaProfilerStart`. Without a GPU it always records."""
        if DEVICE_TRAITS[device.type].runs_async:
            torch.cuda.synchronize(device)  # kernels of the step before are not part of the recording
            torch.cuda.profiler.start()

    @staticmethod
    def stop_capture(device: torch.device) -> None:
        """End what `start_capture` began, after the kernels of the last step."""
        if DEVICE_TRAITS[device.type].runs_async:
            with contextlib.suppress(RuntimeError):  # the tool may have stopped by itself
                torch.cuda.synchronize(device)
                torch.cuda.profiler.stop()

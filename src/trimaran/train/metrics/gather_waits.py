"""Seconds in which a rank waits for weights that others hold, told apart from its own computing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trimaran.train.metrics.step_clock import Clock, Stopwatch

COMM = "comm"


class GatherWaits:
    """The lap in which waits are told apart, if there is one: outside of a step nobody asks."""

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None

    def begin(self, clock: Clock) -> None:
        """Tell apart what is waited for from now on, in the lap that runs."""
        self._watch = clock.stopwatch()

    def end(self, clock: Clock, phase: str) -> None:
        """End the lap: what was waited for in it is `comm`, and the rest `phase`."""
        if self._watch is None:
            clock.lap(phase)
            return
        clock.split(self._watch, rest=phase)
        self._watch = None

    def run(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.run(COMM)


class WatchedGroup(FSDPParamGroup):
    """Weights that FSDP gathers together. On a GPU the stream waits for them in one place, and the host never does."""

    waits: GatherWaits

    def wait_for_unshard(self) -> None:
        with self.waits.run():
            super().wait_for_unshard()


class WatchedGroupOnCPU(WatchedGroup):
    """The same on a CPU, where the host waits: for weights when it asks for them, and for sums of gradients."""

    def unshard(self, async_op: bool = False) -> None:
        with self.waits.run():
            super().unshard(async_op)

    def post_backward(self, *unused: Any) -> None:
        with self.waits.run():
            super().post_backward(*unused)


def watch_gathers(module: nn.Module, waits: GatherWaits) -> None:
    """Let all that FSDP gathers for `module` be told apart by `waits`."""
    for group in _groups(module):
        if type(group) in (FSDPParamGroup, WatchedGroup, WatchedGroupOnCPU):  # of what is not known nothing is told
            group.__class__ = WatchedGroupOnCPU if group.device.type == "cpu" else WatchedGroup
            group.waits = waits  # pyrefly: ignore[missing-attribute]


def _groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            # Before torch 2.13 a module had one group at most.
            many = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from (group for group in many if group is not None)

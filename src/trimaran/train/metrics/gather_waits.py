"""Measures how long a rank waits for FSDP's all-gathers and reductions, apart from its own computation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trimaran.train.metrics.step_clock import SpanTimer, StepClock

COMM = "comm"


class GatherWaits:
    """The spans of the running lap in which this rank waits for FSDP. Outside a step nothing is measured."""

    def __init__(self) -> None:
        self._spans: SpanTimer | None = None

    def begin(self, clock: StepClock) -> None:
        """Measure waits from now on, in the running lap."""
        self._spans = clock.span_timer()

    def end(self, clock: StepClock, phase: str) -> None:
        """End the lap: its waits are `comm`, and the rest is `phase`."""
        if self._spans is None:
            clock.lap(phase)
            return
        clock.split_lap(self._spans, rest=phase)
        self._spans = None

    def span(self) -> AbstractContextManager[None]:
        """Return a context manager that counts its time as waiting."""
        return nullcontext() if self._spans is None else self._spans.span(COMM)


class TimedParamGroup(FSDPParamGroup):
    """An FSDP parameter group that times its waits. On a GPU the stream waits, in this method; the host does not."""

    waits: GatherWaits

    def wait_for_unshard(self) -> None:
        with self.waits.span():
            super().wait_for_unshard()


class TimedParamGroupOnCPU(TimedParamGroup):
    """The same on a CPU, where the host waits for all-gathers in `unshard` and for reductions in `post_backward`."""

    def unshard(self, async_op: bool = False) -> None:
        with self.waits.span():
            super().unshard(async_op)

    def post_backward(self, *unused: Any) -> None:
        with self.waits.span():
            super().post_backward(*unused)


def time_gathers(module: nn.Module, waits: GatherWaits) -> None:
    """Make the FSDP parameter groups of `module` report their waits to `waits`."""
    for group in _param_groups(module):
        if type(group) in (FSDPParamGroup, TimedParamGroup, TimedParamGroupOnCPU):  # leave other subclasses alone
            group.__class__ = TimedParamGroupOnCPU if group.device.type == "cpu" else TimedParamGroup
            group.waits = waits  # pyrefly: ignore[missing-attribute]


def _param_groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            # Before torch 2.13 a module had at most one group.
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)

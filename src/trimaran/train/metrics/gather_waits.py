"""Measures how long a rank waits for FSDP's all-gathers and reductions, apart from its own computation."""

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.parallel.axes.fsdp import parameter_groups
from trimaran.parallel.comm.axis_waits import AXIS_WAITS


class TimedParamGroup(FSDPParamGroup):
    """An FSDP parameter group that times its waits. On a GPU the stream waits, in this method; the host does not."""

    axis: str

    def wait_for_unshard(self) -> None:
        with AXIS_WAITS.span(self.axis):
            super().wait_for_unshard()


class TimedParamGroupOnCPU(TimedParamGroup):
    """The same on a CPU, where the host waits for all-gathers in `unshard` and for reductions in `post_backward`."""

    def unshard(self, async_op: bool = False) -> None:
        with AXIS_WAITS.span(self.axis):
            super().unshard(async_op)

    def post_backward(self, *unused: Any) -> None:
        with AXIS_WAITS.span(self.axis):
            super().post_backward(*unused)


def time_gathers(module: nn.Module, axis: str) -> None:
    """Make the FSDP parameter groups of `module` time their waits, as those of `axis`."""
    for group in parameter_groups(module):
        if type(group) in (FSDPParamGroup, TimedParamGroup, TimedParamGroupOnCPU):  # leave other subclasses alone
            runs_async = DEVICE_TRAITS[group.device.type].runs_async
            group.__class__ = TimedParamGroup if runs_async else TimedParamGroupOnCPU
            group.axis = axis  # pyrefly: ignore[missing-attribute]

"""Takes the waits for other ranks out of the phases in which they occur, and says which axes have them all measured."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from trimaran.core import Plan
from trimaran.core.comm_axes import WORLD, comm_axes
from trimaran.nets import Network
from trimaran.nets.shard_types import is_dtensor
from trimaran.parallel.comm.axis_waits import AXIS_WAITS, NO_SPAN
from trimaran.train.metrics.step_clock import COMM, SpanTimer, StepClock


class LapWaits:
    """The spans of the running lap in which this rank waits. Between `begin` and `end` all collectives report theirs.

    A gather that recompute repeats in backward reports its wait again.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._axes = clock, clock.timed_axes
        self._spans: SpanTimer | None = None

    def begin(self) -> SpanTimer:
        """Measure waits from now on, in the running lap. Returns the timer, to which other spans may be added."""
        self._spans = self._clock.span_timer()
        AXIS_WAITS.start(self._span)
        return self._spans

    def end(self, phase: str, axis: str = "") -> Any:
        """End the lap: its waits are `comm`, and the rest is `phase`. Returns what `StepClock.split_lap` does."""
        AXIS_WAITS.stop()
        spans, self._spans = self._spans, None
        if spans is None:
            self._clock.lap(phase, axis)
            return lambda: 0.0
        return self._clock.split_lap(spans, rest=phase, axis=axis)

    def _span(self, axis: str) -> AbstractContextManager[None]:
        if self._spans is None or (self._axes is not None and axis not in self._axes):
            return NO_SPAN
        return self._spans.span(COMM, axis)


def measured_axes(plan: Plan, networks: Sequence[Network]) -> dict[str, bool]:
    """Return for each axis of the plan whether all its waits are measured.

    Compiled blocks run their collectives inside torch's code, and layers from elsewhere run those of DTensor. DeepSpeed
    has its own. Replicas of sharded weights reduce in the same call as the shards, so their wait is part of that axis.
    """
    measured = dict.fromkeys(comm_axes(plan), True)
    missing: list[str] = ["tp", "cp"] if plan.compile else []
    if plan.engine != "torch":
        missing += [axis for axis in measured if axis != WORLD]
    if plan.sharding != "none" and plan.mesh.shards > 1 and not plan.comm.local.is_on:
        missing.append("dp_replicate")
    if plan.mesh.tp > 1 and any(_uses_dtensor(each) for network in networks for each in network.module.modules()):
        missing.append("tp")
    return {axis: axis not in missing for axis in measured}


def _uses_dtensor(module: nn.Module) -> bool:
    """Return whether a tensor-parallel layer leaves its communication to DTensor."""
    from trimaran.parallel.axes.sharded_modules import computes_with_shards  # noqa: PLC0415  with tp it is imported

    if not isinstance(module, nn.Linear | nn.Embedding) or computes_with_shards(module):
        return False
    sharded = (each for each in module.parameters(recurse=False) if is_dtensor(each))
    return any("tp" in (each.device_mesh.mesh_dim_names or ()) for each in sharded)

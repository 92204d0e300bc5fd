"""Records the passes of a pipeline rank: which stage computes which micro-batch, in which order, and for how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.parallel.axes.pp import TimedStage
from trimaran.train.metrics.step_clock import cuda_seconds

METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class TimedPass(NamedTuple):
    """A pass as a rank ran it: its kind as in `simulate.pipeline_order`, and functions of when it began and ended."""

    kind: str
    stage: int
    micro_batch: int
    read_seconds: Callable[[], float]


class PassRecorder:
    """The passes of the step that is running, or of the last one. On a GPU read their times when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.passes: list[TimedPass] = []
        self._on_gpu = DEVICE_TRAITS[device.type].runs_async

    def restart(self) -> None:
        """Forget the passes so far: a step begins."""
        self.passes = []

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, stage: int, micro_batch: int, start: Any) -> None:
        end = self.mark()
        read = (lambda: cuda_seconds(start, end)) if self._on_gpu else (lambda: end - start)
        self.passes.append(TimedPass(kind, stage, micro_batch, read))

    @property
    def order(self) -> list[tuple[str, int, int]]:
        return [each[:3] for each in self.passes]

    def mean_seconds(self) -> dict[int, dict[str, float]]:
        """Return the mean seconds of a micro-batch's passes, by stage and kind."""
        found: dict[int, dict[str, list[float]]] = {}
        for each in self.passes:
            found.setdefault(each.stage, {}).setdefault(each.kind, []).append(each.read_seconds())
        return {
            stage: {kind: sum(seconds) / len(seconds) for kind, seconds in kinds.items()}
            for stage, kinds in found.items()
        }


@contextmanager
def recorded_passes(device: torch.device) -> Iterator[PassRecorder]:
    """Record the passes of all pipeline stages inside the block."""
    recorder = PassRecorder(device)
    originals = {name: getattr(TimedStage, name) for name in METHODS}
    for name, original in originals.items():
        setattr(TimedStage, name, _recording(original, recorder))
    try:
        yield recorder
    finally:
        for name, original in originals.items():
            setattr(TimedStage, name, original)


def _recording(original: Callable[..., Any], recorder: PassRecorder) -> Callable[..., Any]:
    @wraps(original)
    def recording(stage: TimedStage, number: int, *args: Any, **kwargs: Any) -> Any:
        start = recorder.mark()
        result = original(stage, number, *args, **kwargs)
        recorder.add(_kind(original.__name__, kwargs), stage.stage_index, number, start)
        return result

    return recording


def _kind(method: str, kwargs: dict[str, Any]) -> str:
    if method == "backward_one_chunk":
        return "backward" if kwargs.get("full_backward", True) else "input_grad"
    return "forward" if method == "forward_one_chunk" else "weight_grad"

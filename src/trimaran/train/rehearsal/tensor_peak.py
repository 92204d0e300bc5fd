"""The peak of a rank's tensors on a CPU, by torch's own record of what its allocator gives out and takes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The record of single allocations is private in torch.
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile


@dataclass(slots=True)
class TensorPeak:
    """Bytes of a rank's tensors at their peak, at the peak of the steps after the warm-up, and those reserved for them.

    On a CPU, tensors that other threads allocate (loaders) are not counted, and nothing is reserved.
    """

    whole: int = 0
    steps: int = 0
    reserved: int = 0
    first_step_ns: int = 0  # where the steps begin, on the clock of the profiler

    def mark_steps(self, now_ns: int) -> None:
        """Say that what follows are the steps whose peak is `steps`."""
        self.first_step_ns = now_ns


@contextmanager
def measured_tensors() -> Iterator[TensorPeak]:
    """Measure the tensors that this thread, and the backward that it starts, allocate on the CPU inside the block.

    A process can do so once: later records of torch's profiler may be empty.
    """
    peak = TensorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    live, sizes = 0, dict[int, int]()
    for when, address, change in sorted(_allocations(results.experimental_event_tree())):
        if change > 0:
            # What another thread freed, such as one of gloo's, is not recorded; its memory is used again.
            live += change - sizes.get(address, 0)
            sizes[address] = change
        else:
            live -= sizes.pop(address, 0)
        peak.whole = max(peak.whole, live)
        if when >= peak.first_step_ns:
            peak.steps = max(peak.steps, live)


def _allocations(roots: list[_ProfilerEvent]) -> Iterator[tuple[int, int, int]]:
    """Yield the time, address and size of every allocation, and of every release with the size below 0."""
    waiting = [*roots]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size

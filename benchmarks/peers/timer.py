"""Times steps with CUDA events, so that no step has to synchronise."""

import time
from typing import Any

import torch
from benchmarks.peers.work import Work


class Timer:
    """Call `step` after every step. The device is synchronised twice: before and after the timed steps."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[Any] = []
        self._num_steps = 0
        self._began = self._wall = 0.0
        self.first_step_time = 0.0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            self.synchronise()
            self.first_step_time = time.time()
        if self._num_steps == self._work.warm:
            self.synchronise()
            self._began = time.perf_counter()
        if self._work.warm <= self._num_steps <= self._work.all_steps:
            self._marks.append(self._mark())
        if self._num_steps == self._work.all_steps:
            self.synchronise()
            self._wall = time.perf_counter() - self._began

    @property
    def seconds(self) -> list[float]:
        """The seconds of each timed step."""
        between = _cuda_seconds if self._on_gpu else _host_seconds
        return [between(*pair) for pair in zip(self._marks, self._marks[1:], strict=False)]

    @property
    def wall_seconds(self) -> float:
        """The wall-clock seconds of all timed steps on the host, with the device idle at both ends."""
        return self._wall

    def synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1000


def _host_seconds(start: float, end: float) -> float:
    return end - start

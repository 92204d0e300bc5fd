"""Times steps with CUDA events, so that no timed step has to synchronise."""

import time
from itertools import pairwise
from typing import Any

import torch
from benchmarks.peers.gate import Gate
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

    def step(self) -> bool:
        """Return whether this process has waited for its turn."""
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
        return False

    @property
    def seconds(self) -> list[float]:
        """The seconds of each timed step."""
        return self._between(self._marks)

    @property
    def wall_seconds(self) -> float:
        """The wall-clock seconds of all timed steps on the host, with the device idle at both ends."""
        return self._wall

    def synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _between(self, marks: list[Any]) -> list[float]:
        between = _cuda_seconds if self._on_gpu else _host_seconds
        return [between(*pair) for pair in pairwise(marks)]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TurnTimer(Timer):
    """A timer whose windows alternate with those of peers in other processes.

    Every window waits at the gate for its turn, then `settle` untimed steps follow, then the timed ones. The device is
    synchronised only at the gate.
    """

    def __init__(self, work: Work, gate: Gate) -> None:
        super().__init__(work)
        self._gate = gate
        self._windows: list[dict[str, Any]] = []
        self._cpu_began = 0.0

    def step(self) -> bool:
        self._num_steps += 1
        if self._num_steps == 1:
            self.synchronise()
            self.first_step_time = time.time()
        done, settle = self._num_steps - self._work.warm, self._work.settle
        if done < 0 or len(self._windows) == self._work.windows:
            return False
        position = done % (settle + self._work.steps)
        if done and position == 0:
            self._close_window()
        if position == 0:
            self.wait()
        if position == settle:
            self._began, self._cpu_began, self._marks = time.perf_counter(), time.process_time(), [self._mark()]
        elif position > settle:
            self._marks.append(self._mark())
        return position == 0

    @property
    def seconds(self) -> list[float]:
        return [each for window in self._windows for each in window["seconds"]]

    @property
    def wall_seconds(self) -> float:
        return sum(window["wall_seconds"] for window in self._windows)

    @property
    def cpu_seconds(self) -> list[float]:
        """The CPU seconds of all ranks in each window: those of this one, times their number."""
        return [window["cpu_seconds"] for window in self._windows]

    def add(self, window: dict[str, Any]) -> None:
        """Add a window that the peer has timed itself: `seconds`, `wall_seconds` and `cpu_seconds`."""
        self._windows.append(window)

    def wait(self) -> None:
        """Wait for the turn, with unused device memory freed for the others. After the last window, do not wait."""
        self.synchronise()
        if not self._windows:
            if self._on_gpu:
                torch.cuda.empty_cache()
            device = torch.cuda.get_device_name() if self._on_gpu else "cpu"
            self._gate.wait("ready", torch=torch.__version__, device=device)
        elif len(self._windows) < self._work.windows:
            self._gate.wait("window", **self._windows[-1])

    def _close_window(self) -> None:
        self._marks.append(self._mark())
        wall, cpu = time.perf_counter() - self._began, (time.process_time() - self._cpu_began) * self._work.ranks
        self.synchronise()
        self.add({"seconds": self._between(self._marks), "wall_seconds": wall, "cpu_seconds": cpu})


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1000


def _host_seconds(start: float, end: float) -> float:
    return end - start

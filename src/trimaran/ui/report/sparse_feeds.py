"""Details of steps and samples of machines, evenly spread over a run, without reading the lines in between."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trimaran.core import open_regular_file
from trimaran.runs import RunDirectory, RunReader, StepLine, parse_lines, read_details, read_step
from trimaran.ui.report.curves import DetailedStep, Point, Spread, number, spread, tree

MAX_STEPS = 800
MAX_FULLY_READ_BYTES = 4 << 20
MARK = b'"memory":'  # of lines with slow details, which most lines of a long run leave out
MAX_SKIPPED_LINES = 64  # without them, at one place
MAX_PART_BYTES = 1 << 20  # of a line that is read at one place


class DetailsFeed:
    """`steps` are the steps with details: at most `MAX_STEPS`, evenly spread, and those since the last thinning."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reader: RunReader | None = None
        self.steps: list[DetailedStep] = []

    def refresh(self) -> bool:
        """Read what was appended, and return whether there was anything; the first call spreads over the file."""
        if self._reader is None:
            self._reader = RunReader(self._run).follow(self._run.metrics, backlog=0)
            self.steps = detailed_steps(self._run)
            return True
        has_new = False
        for line in self._reader.lines(self._run.metrics):
            has_new = True
            if MARK in line and (step := read_step(line)) is not None:
                while self.steps and self.steps[-1][0] >= step.step:  # a step that is repeated
                    self.steps.pop()
                self.steps.append((step.step, read_details(step.rest)))
        if len(self.steps) > 2 * MAX_STEPS:
            self.steps = self.steps[1::2]
        return has_new


def detailed_steps(run: RunDirectory) -> list[DetailedStep]:
    """Return (step, details) of a short run's steps; of a long run, those of evenly spread steps."""
    try:
        with open_regular_file(run.metrics) as file:
            file.seek(0, 2)
            steps = _all(file) if file.tell() <= MAX_FULLY_READ_BYTES else list(_spread(file, file.tell()))
    except FileNotFoundError:
        return []
    found = {step.step: read_details(step.rest) for step in steps}  # the last line of a step that was repeated
    return sorted(found.items())


def _all(file: BinaryIO) -> list[StepLine]:
    file.seek(0)
    steps = [step for step in map(read_step, file) if step is not None]
    every = 1
    if len(steps) >= MAX_STEPS:
        steps = [step for step in steps if MARK in step.rest] or steps
    while len(steps) // every >= MAX_STEPS:
        every *= 2
    return steps[every - 1 :: every]


def _spread(file: BinaryIO, size: int) -> Iterator[StepLine]:
    for _ in _even_places(file, size, MAX_STEPS // 2):
        for _ in range(MAX_SKIPPED_LINES):
            line = file.readline(MAX_PART_BYTES)
            if MARK in line and (step := read_step(line)) is not None:
                yield step
                break


def _even_places(file: BinaryIO, size: int, count: int) -> Iterator[None]:
    """Move to the beginnings of `count` evenly spread lines."""
    for place in range(count):
        file.seek(place * size // count)
        if not place or file.readline(MAX_PART_BYTES).endswith(b"\n"):  # the rest of a line, if it is not a damaged one
            yield


Sample = dict[str, Any]
MAX_LINES = 2000  # of all nodes together
MIN_NODE_LINES = 20
MAX_SAMPLE_BYTES = 1 << 20  # of a file that is fully read
MAX_POINTS = 4096  # of a quantity that are kept

HOST: dict[str, Callable[[Sample], float]] = {
    "cpu": lambda each: number(each.get("cpu")),
    "ram": lambda each: _fraction(each, "ram_used", "ram"),
    "disk_free": lambda each: number(each.get("disk_free")),
    "network": lambda each: number(each.get("net_received")) + number(each.get("net_sent")),
}
GPU: dict[str, Callable[[Sample], float]] = {
    "gpu_utilisation": lambda each: number(each.get("utilisation")),
    "gpu_memory": lambda each: _fraction(each, "memory_used", "memory"),
    "gpu_power": lambda each: number(each.get("power")),
    "gpu_temperature": lambda each: number(each.get("temperature")),
    "gpu_clock": lambda each: _fraction(each, "sm_clock", "sm_clock_max"),
}


class MachinesFeed:
    """Follows the samples of all nodes: `points` are values of every quantity by time, in bounded memory."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder, self._reader, self._paths = run.samples(0).parent, RunReader(run), set[Path]()
        self._points: dict[str, list[Point]] = {}

    def refresh(self) -> bool:
        """Read what was appended, and return whether there was anything. Of a long past only some lines are read."""
        paths = sorted(self._folder.glob("node-*.jsonl"))
        has_new = False
        for path in paths:
            if path in self._paths:
                lines = self._reader.lines(path)
            else:
                self._paths.add(path)
                self._reader.follow(path, backlog=0)
                lines = spread_lines(path, max(MIN_NODE_LINES, MAX_LINES // len(paths)))
            for sample in parse_lines(lines):
                has_new = True
                at, gpus = number(sample.get("time")), sample.get("gpus")
                values = [(name, value(sample)) for name, value in HOST.items()]
                for gpu in gpus if isinstance(gpus, list) else []:
                    values += [(name, value(tree(gpu))) for name, value in GPU.items()]
                for name, value in values if math.isfinite(at) else ():
                    self._points.setdefault(name, []).append((at, value))
        for name, points in self._points.items():
            if len(points) > MAX_POINTS:
                self._points[name] = sorted(points)[::2]
        return has_new

    def spreads(self) -> dict[str, list[Spread]]:
        found = {name: spread(self._points[name]) for name in (*HOST, *GPU) if name in self._points}
        return {name: spreads for name, spreads in found.items() if spreads}


def spread_lines(path: Path, count: int) -> Iterator[bytes]:
    """Yield all lines of a small file; of a large one `count` evenly spread lines, without reading the others."""
    with open_regular_file(path) as file:
        if (size := path.stat().st_size) <= MAX_SAMPLE_BYTES:
            yield from file
            return
        for _ in _even_places(file, size, count):
            yield file.readline(MAX_PART_BYTES)


def _fraction(each: Sample, part: str, total: str) -> float:
    return number(each.get(part)) / (number(each.get(total)) or math.nan)

"""Samples of a run's machines over time: a few hundred of each, however long the run is."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimaran.core import open_regular_file
from trimaran.runs import RunDirectory, RunReader
from trimaran.runs.journal import parse_lines
from trimaran.ui.report.curves import Point, Spread, number, spread, tree

Sample = dict[str, Any]
MAX_LINES = 2000  # of all nodes together
MIN_NODE_LINES = 20
MAX_FULLY_READ_BYTES = 1 << 20
MAX_PART_BYTES = 1 << 20  # of a line of a larger file
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
                _add_points(sample, self._points)
                has_new = True
        for name, points in self._points.items():
            if len(points) > MAX_POINTS:
                self._points[name] = sorted(points)[::2]
        return has_new

    def spreads(self) -> dict[str, list[Spread]]:
        """Return minimum, mean and maximum over all nodes (or GPUs) of every sampled quantity, by time."""
        found = {name: spread(self._points[name]) for name in (*HOST, *GPU) if name in self._points}
        return {name: spreads for name, spreads in found.items() if spreads}


def _add_points(sample: Sample, points: dict[str, list[Point]]) -> None:
    at = number(sample.get("time"))
    if not math.isfinite(at):
        return
    for name, value in HOST.items():
        points.setdefault(name, []).append((at, value(sample)))
    gpus = sample.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else []:
        for name, value in GPU.items():
            points.setdefault(name, []).append((at, value(tree(gpu))))


def spread_lines(path: Path, count: int) -> Iterator[bytes]:
    """Yield all lines of a small file; of a large one `count` evenly spread lines, without reading the others."""
    size = path.stat().st_size
    with open_regular_file(path) as file:
        if size <= MAX_FULLY_READ_BYTES:
            yield from file
            return
        for part in range(count):
            file.seek(part * size // count)
            if file.readline(MAX_PART_BYTES).endswith(b"\n"):  # the rest of a line, if it is not a damaged one
                yield file.readline(MAX_PART_BYTES)


def _fraction(each: Sample, part: str, total: str) -> float:
    return number(each.get(part)) / (number(each.get(total)) or math.nan)

"""Measures from time to time how fast nodes are that the run goes on without. They are idle: it costs the run nothing.

The first measurement is made at once, while the node is still slow. Those after it become rarer, from some seconds to
minutes. If one shows a faster node, the next follows soon, to confirm it. The autopilot reads the file and decides.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from trimaran.runs import RunDirectory
from trimaran.runs.left_out_nodes import MIN_SPEEDUP, add_speed, read_node_speeds, write_node_speeds

log = logging.getLogger(__name__)

FIRST_SECONDS, MAX_SECONDS = 10.0, 600.0  # between two measurements; doubled each time
MEASURED_SECONDS = 1.0  # a CPU quota applies to periods of 0.1 s: a short measurement would not see it
ANSWER_SECONDS = 60.0  # then the node is asked again


class MeasurableNode(Protocol):
    """A node that can measure how fast its devices compute: `LocalNode` and `RemoteNode`."""

    def begin_speed(self, kind: str, *, seconds: float) -> None:
        """Begin to measure the devices, which must be idle."""
        ...

    def take_speed(self) -> float | None:
        """Return the measured speed, once; None until it is known."""
        ...


class LeftOutWatch:
    """Keeps the speeds of left-out nodes in the run directory. `kind` is that of their devices: `cpu` or `cuda`."""

    def __init__(self, run: RunDirectory, kind: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._kind, self._clock = run, kind, clock
        self._speeds = read_node_speeds(run)
        self._due: dict[str, float] = {}
        self._pause: dict[str, float] = {}

    def poll(self, nodes: Mapping[str, MeasurableNode]) -> None:
        """Measure those of the left-out nodes, by host, that are due, and note what they answered."""
        gone = self._speeds.keys() - nodes.keys()
        if gone:  # if a node is left out again, it is compared with its speed then
            self._speeds = {host: speeds for host, speeds in self._speeds.items() if host not in gone}
            write_node_speeds(self._run, self._speeds)
        for known in (self._due, self._pause):
            for host in known.keys() - nodes.keys():
                del known[host]
        for host, node in nodes.items():
            now = self._clock()
            if (speed := node.take_speed()) is not None:
                self._note(host, speed, now)
            if now >= self._due.get(host, 0.0):
                self._due[host] = now + ANSWER_SECONDS
                node.begin_speed(self._kind, seconds=MEASURED_SECONDS)

    def _note(self, host: str, speed: float, now: float) -> None:
        before = self._speeds.get(host, ())
        self._speeds[host] = add_speed(before, speed)
        write_node_speeds(self._run, self._speeds)
        is_faster = bool(before) and speed >= MIN_SPEEDUP * before[0]
        pause = FIRST_SECONDS if is_faster else self._pause.get(host, FIRST_SECONDS)
        self._pause[host] = min(MAX_SECONDS, 2 * pause)
        self._due[host] = now + pause
        log.info("%s, which is left out, computes %.2f times as fast as then", host, speed / self._speeds[host][0])

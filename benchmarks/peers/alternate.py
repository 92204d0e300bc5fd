"""Peers that alternate window by window: all of a contest are in memory at once, and one at a time uses the device.

A contest has three phases. All its peers import; that happens while the contest before compiles, so that nothing
disturbs a measurement. They build, compile and warm up in parallel. Then they alternate, one window each, in reverse
order in every other round, while all others wait.
"""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.work import Work

Start = Callable[[Work, int], subprocess.Popen[str]]


@dataclass(slots=True)
class Waiting:
    """A peer's process, and what it has reported. `state` is the last report's; `gone` once it has ended."""

    work: Work
    number: int
    process: subprocess.Popen[str]
    reports: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    state: str = "started"
    machine: dict[str, Any] = field(default_factory=dict)  # `torch` and `device`, known once it is ready
    windows: list[dict[str, Any]] = field(default_factory=list)  # all but the last, which comes with `line`
    line: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.reports.put(json.loads(text))
        self.reports.put(None)

    def allow(self) -> None:
        """Allow what the process waits for."""
        assert self.process.stdin is not None
        self.state = "running"
        try:
            print("go", file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.state = "gone"

    def next_report(self, until: float) -> None:
        """Take the next report. A process that reports nothing until then is killed."""
        try:
            report = self.reports.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            self.process.kill()
            self.state = "gone"
            return
        self.state = report.pop("state") if report else "gone"
        if report and self.state == "ready":
            self.machine = report
        if report and self.state == "window":
            self.windows.append(report)
        if report and self.state == "done":
            self.line = report["line"]

    def partial_line(self) -> dict[str, Any] | None:
        """Return a line of the windows that there was time for, if any."""
        if not self.windows:
            return None
        line = {"contest": self.work.contest, "peer": self.work.peer, "model": self.work.shape, "version": "unknown"}
        line |= self.machine | {"tokens_per_step": self.work.tokens_per_step, "window": self.work.steps}
        line |= {"seconds": [each for window in self.windows for each in window["seconds"]]}
        line |= {"cpu_seconds": [window["cpu_seconds"] for window in self.windows], "time": round(time.time())}
        line |= {"peak_bytes": 0, "reserved_bytes": 0, "start_seconds": 0.0, "first_loss": 0.0, "last_loss": 0.0}
        return line | {"note": f"the time was up after {len(self.windows)} of {self.work.windows} windows"}

    def poll(self, until: float) -> bool:
        """Take a report if there is one or the time is up; return whether the state has changed."""
        if self.reports.empty() and time.monotonic() < until:
            return False
        self.next_report(until)
        return True


class Contest:
    """The peers of one contest, from their start to their lines."""

    def __init__(self, works: Sequence[Work], start: Start, first_number: int) -> None:
        self.peers = [
            Waiting(work, first_number + each, start(work, first_number + each)) for each, work in enumerate(works)
        ]

    def import_all(self, until: float) -> None:
        for peer in self.peers:
            if peer.state == "started":
                peer.next_report(until)

    def build(self, parallel: int, until: float) -> None:
        """Let at most `parallel` peers at once build, compile and warm up."""
        left, busy = [peer for peer in self.peers if peer.state == "imported"], []
        while left or busy:
            while left and len(busy) < parallel:
                peer = left.pop(0)
                peer.allow()
                busy.append(peer)
            busy = [peer for peer in busy if not peer.poll(until) or peer.state == "running"]
            time.sleep(0.02)

    def measure(self, until: float, report: Callable[[str], None]) -> None:
        """Alternate until every peer has had its windows, or the time is up."""
        number = 0
        while waiting := [peer for peer in self.peers if peer.state in ("ready", "window")]:
            for peer in waiting[:: -1 if number % 2 else 1]:
                if time.monotonic() > until:
                    report("the time is up")
                    return
                peer.allow()
                peer.next_report(until)
            number += 1

    def end(self) -> None:
        for peer in self.peers:
            peer.process.kill()
            peer.process.wait()


def run(
    contests: Sequence[Sequence[Work]], start: Start, save: Callable[[Waiting], None], *, parallel: int, until: float
) -> list[Work]:
    """Measure the contests and return the work of those that had no time left. `save` gets every peer at its end."""
    upcoming: Contest | None = None
    for index, works in enumerate(contests):
        if time.monotonic() > until:
            if upcoming:
                upcoming.end()
            return [work for left in contests[index:] for work in left]
        contest = upcoming or Contest(works, start, 100 * index)
        contest.import_all(until)
        upcoming = None
        if index + 1 < len(contests):
            upcoming = Contest(contests[index + 1], start, 100 * (index + 1))
        began = time.monotonic()
        contest.build(parallel, until)
        if upcoming:
            upcoming.import_all(until)
        built = time.monotonic()
        print(f"{works[0].contest}: built in {built - began:.0f} s", flush=True)
        contest.measure(until, print)
        print(f"{works[0].contest}: measured in {time.monotonic() - built:.0f} s", flush=True)
        for peer in contest.peers:
            save(peer)
        contest.end()
    return []


def compile_threads(parallel: int) -> str:
    """Return how many threads each process may compile with, so that together they use the machine's cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // parallel))

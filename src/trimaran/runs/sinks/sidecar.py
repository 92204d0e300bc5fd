"""`python -m trimaran.runs.sinks.sidecar RUN NODE`: samples a node of a run; on node 0 it also feeds the sinks.

The supervisor starts one process per node (`launch/supervise/side_processes.py`), which dies with it. It only reads
and writes files of the run directory, so that training continues whatever happens to it or to a sink. It exits with 0
on SIGTERM, or if there is nothing to do. The supervisor tells it what it would read from the recipe, as parsing needs
pydantic, which takes longer to import than all the rest.
"""

import argparse
import contextlib
import logging
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.runs.heartbeat import HeartbeatBoard
from trimaran.runs.process_control import die_with_parent
from trimaran.runs.read.run_reader import RunTail
from trimaran.runs.run_directory import DESCRIPTORS, RunDirectory, open_run
from trimaran.runs.sinks.sampler import FIRST_SAMPLE_SECONDS, Sampler
from trimaran.runs.sinks.sink import SinkFeed

if TYPE_CHECKING:
    from trimaran.core import TelemetrySection

log = logging.getLogger(__name__)

NICENESS = 10  # ranks have priority
POLL_SECONDS = 1.0  # between polls of the run's files
SAVE_POSITION_SECONDS = 10.0  # between saves of how far the files were read
CLOSE_SECONDS = 3.0  # timeout to close all sinks; the supervisor waits slightly longer


class TerminationSignal:
    """Waits for SIGTERM without holding a lock, because the handler would deadlock on it."""

    def __init__(self) -> None:
        self.received = False
        self._pipe, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or as soon as SIGTERM arrives."""
        if not self.received:
            select.select([self._pipe], [], [], seconds)
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, 4096)


class Sidecar:
    """Samples a node and feeds the sinks until SIGTERM arrives. `flags` are those of the command line."""

    def __init__(self, run: RunDirectory, termination: TerminationSignal, flags: argparse.Namespace) -> None:
        self._termination, self._flags = termination, flags
        self._closing = False
        self._feeds = open_feeds(run.read_recipe().telemetry, run) if flags.sinks else []
        self._tail = RunTail(run) if self._feeds else None
        ancestor = flags.supervisor if flags.above is None else flags.above
        board = HeartbeatBoard(flags.heartbeats) if flags.heartbeats is not None else None
        self._sampler: Sampler | None = None
        if flags.sample_seconds > 0:
            self._sampler = Sampler(run, flags.node, supervisor=ancestor, visible=flags.visible, board=board)
        self._save_due = 0.0

    def run_until_terminated(self) -> None:
        """Sample and feed the sinks until SIGTERM arrives or the supervisor dies."""
        interval = self._flags.sample_seconds
        now = time.monotonic()
        sample_due = now + min(FIRST_SAMPLE_SECONDS, interval) if self._sampler else float("inf")
        poll_due = now if self._tail else float("inf")
        while self._sampler or self._tail:
            self._termination.wait(max(0.0, min(sample_due, poll_due) - time.monotonic()))
            if self._termination.received or os.getppid() != self._flags.supervisor:
                break
            now = time.monotonic()
            if self._sampler and now >= sample_due:
                self._sampler.take()
                sample_due = max(sample_due + interval, now)
            if now >= poll_due:
                self._feed_new_lines()
                poll_due = now + POLL_SECONDS
        # Write the last sample, feed the last lines and close the sinks. Sinks that hang are abandoned.
        if self._sampler:
            self._sampler.take_last()
            self._sampler.close()
        self._closing = True
        self._feed_new_lines()
        until = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            if not feed.close(seconds=max(0.0, until - time.monotonic())):
                log.warning("sink %s did not close in time and is abandoned", feed.sink.name)

    def _feed_new_lines(self) -> None:
        """Hand new lines to the sinks. After a disk error the next poll tries again."""
        if self._tail is None:
            return
        with contextlib.suppress(OSError):
            for kind, line in self._tail.new():
                for feed in self._feeds:
                    feed.put(kind, line)
            if time.monotonic() >= self._save_due or self._closing:
                self._save_due = time.monotonic() + SAVE_POSITION_SECONDS
                self._tail.save_position()


def open_feeds(telemetry: "TelemetrySection", run: RunDirectory) -> list[SinkFeed]:
    """Open the recipe's sinks and return their feeds; sinks that cannot be opened are logged."""
    try:
        from trimaran.runs.sinks.open_sinks import open_sinks  # noqa: PLC0415  a sidecar without sinks is small

        return [SinkFeed(sink) for sink in open_sinks(telemetry, run)]
    except Exception:  # the sampler must not fail because of a sink
        log.exception("cannot open the sinks")
        return []


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trimaran.runs.sinks.sidecar", description="Sample a node of a run."
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("node", type=int, help="the number of this node")
    parser.add_argument("--sample-seconds", type=float, required=True, help="interval of samples; 0: never")
    parser.add_argument("--sinks", action="store_true", help="feed the sinks of the recipe")
    parser.add_argument("--visible", help="the GPUs of the run, as CUDA_VISIBLE_DEVICES; without it, all")
    parser.add_argument("--supervisor", type=int, default=os.getppid(), help="the process with which the sidecar ends")
    parser.add_argument("--descriptor", type=int, help="an inherited descriptor of the run directory, to open files in")
    parser.add_argument("--above", type=int, help="the process that started the ranks, if it is not the supervisor")
    parser.add_argument("--heartbeats", type=int, help="an inherited descriptor of the heartbeat board")
    flags = parser.parse_args()
    termination = TerminationSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    path = flags.run if flags.descriptor is None else Path(f"{DESCRIPTORS}{flags.descriptor}")
    Sidecar(open_run(path), termination, flags).run_until_terminated()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # a hanging sink or a library's thread must not keep this process alive

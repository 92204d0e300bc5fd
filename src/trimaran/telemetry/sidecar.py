"""`python -m trimaran.telemetry.sidecar RUN NODE`: samples a machine of a run and tells the run's sinks, beside it.

One process for each node, started by its supervisor (`launch/sidecar_process.py`), with which it dies. It reads and writes
files of the run directory and nothing else of the run: whatever happens to it or to a sink, training goes on. It leaves
with 0 when it was told to, or when there is nothing to do.
"""

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import select
import signal
import time
from pathlib import Path

from trimaran.core.recipe import TelemetrySection
from trimaran.run.run_directory import RunDirectory, open_run
from trimaran.telemetry.run_tail import Tail
from trimaran.telemetry.sampler import FIRST_SECONDS, Sampler
from trimaran.telemetry.sink_feed import SinkFeed

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
NICE = 10  # ranks come first
FOLLOW_SECONDS = 1.0  # between looks at what the ranks have written
KEEP_SECONDS = 10.0  # between notes of how far that was read
CLOSE_SECONDS = 3.0  # for all sinks together; their supervisor waits a little longer


class Bell:
    """Hears SIGTERM. Waiting for it holds no lock, which a handler would then wait for as well."""

    def __init__(self) -> None:
        self.rung = False
        self._end, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._ring)

    def _ring(self, *_: object) -> None:
        self.rung = True

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or as soon as it rings."""
        if not self.rung:
            select.select([self._end], [], [], seconds)
            with contextlib.suppress(BlockingIOError):
                os.read(self._end, 4096)


class Sidecar:
    """What one node's sidecar does until the bell rings. `visible` is as CUDA_VISIBLE_DEVICES of the ranks, which are
    below `above`, or below the supervisor."""

    def __init__(
        self, run: RunDirectory, node: int, bell: Bell, *, supervisor: int, above: int | None, visible: str | None
    ) -> None:
        self.run, self.node, self._bell, self._supervisor = run, node, bell, supervisor
        self._closing = False
        self._telemetry = run.read_recipe().telemetry
        self._feeds = open_feeds(self._telemetry, run) if node == 0 else []
        self._tail = Tail(run) if self._feeds else None
        asked = self._telemetry.sample_seconds > 0
        family = supervisor if above is None else above
        self._sampler = Sampler(run, node, supervisor=family, visible=visible) if asked else None
        self._keep_due = 0.0

    def work(self) -> None:
        """Sample and follow to the end."""
        pause = self._telemetry.sample_seconds
        now = time.monotonic()
        sample_due = now + min(FIRST_SECONDS, pause) if self._sampler else float("inf")
        follow_due = now if self._tail else float("inf")
        while self._sampler or self._tail:
            self._bell.wait(max(0.0, min(sample_due, follow_due) - time.monotonic()))
            if self._bell.rung or os.getppid() != self._supervisor:
                break
            now = time.monotonic()
            if self._sampler and now >= sample_due:
                self._sampler.take()
                sample_due = max(sample_due + pause, now)
            if now >= follow_due:
                self._follow()
                follow_due = now + FOLLOW_SECONDS
        self._close()

    def _follow(self) -> None:
        """Hand on what is new. A disk in trouble is looked at again a moment later."""
        if self._tail is None:
            return
        with contextlib.suppress(OSError):
            for kind, line in self._tail.new():
                for feed in self._feeds:
                    feed.put(kind, line)
            if time.monotonic() >= self._keep_due or self._closing:
                self._keep_due = time.monotonic() + KEEP_SECONDS
                self._tail.keep()

    def _close(self) -> None:
        """Write and hand on the last lines. Sinks that hang are left behind."""
        if self._sampler:
            self._sampler.take_last()
            self._sampler.close()
        self._closing = True
        self._follow()
        until = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            if not feed.close(seconds=max(0.0, until - time.monotonic())):
                log.warning("sink %s does not end and is left behind", feed.sink.name)


def open_feeds(telemetry: TelemetrySection, run: RunDirectory) -> list[SinkFeed]:
    """Return the sinks that the recipe asks for, at work; those that cannot be opened are told in the log."""
    try:
        # Only now: a sidecar that has nobody to tell is at work sooner.
        sinks = importlib.import_module("trimaran.telemetry.sinks.open").open_sinks(telemetry, run)
        return [SinkFeed(sink) for sink in sinks]
    except Exception:  # a sink's trouble is not the sampler's
        log.exception("sinks cannot be opened")
        return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimaran.telemetry.sidecar", description="Watch a run's machine.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("node", type=int, help="which machine of the run this is; 0 also feeds the sinks")
    parser.add_argument("--visible", help="the GPUs of the run, as CUDA_VISIBLE_DEVICES; without it, all")
    parser.add_argument("--supervisor", type=int, default=os.getppid(), help="the process to end with")
    parser.add_argument("--above", type=int, help="the process that started the ranks, where it is not that one")
    flags = parser.parse_args()
    bell = Bell()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a person's Ctrl-C: the supervisor decides what it means
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(OSError):
        os.nice(NICE)
    how = {"supervisor": flags.supervisor, "above": flags.above, "visible": flags.visible}
    Sidecar(open_run(flags.run), flags.node, bell, **how).work()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # a sink that hangs, or a library's thread, must not keep this process

"""A page that a Prometheus server reads: the numbers of one run, by the names of `catalogue.py`."""

import contextlib
import logging
import threading
import time
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server, write_to_textfile

from trimaran.core import TelemetrySection
from trimaran.core.recipe import PrometheusSection
from trimaran.telemetry.attempts import read_attempts
from trimaran.telemetry.ledger import ledger_of
from trimaran.telemetry.run_directory import RunDirectory
from trimaran.telemetry.sinks.machine_series import MachineSeries
from trimaran.telemetry.sinks.run_series import RunSeries
from trimaran.telemetry.sinks.series import Series
from trimaran.telemetry.sinks.sink import Line
from trimaran.telemetry.sinks.trouble_series import TroubleSeries

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # between tries to get the port


class PrometheusSink:
    """Shows a run on a port of this machine; without one, only in a file at the end.

    While somebody else has the port, nothing is lost: it is tried again.
    """

    name = "prometheus"

    def __init__(self, run: RunDirectory, section: PrometheusSection, *, steps: int = 0) -> None:
        self.series = Series(run.path.name)
        self._run, self._section = run, section
        self._training = RunSeries(self.series, steps=steps)
        self._trouble = TroubleSeries(self.series)
        self._machines = MachineSeries(self.series)
        self._time = TimeSeries(run, self.series)
        for each in read_attempts(run).attempts[-1:]:
            if each.ended is None:  # it began before this sink did
                self._training.start(each.number, {"world_size": each.world_size})
        self.series.before_scrape = self._refresh
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._tried, self._told = -RETRY_SECONDS, False
        self._serve()

    def step(self, line: Line) -> None:
        with self.series.lock:
            self._training.step(line)
        self._time.look()
        self._serve()

    def event(self, line: Line) -> None:
        with self.series.lock:
            self._training.event(line)
            self._trouble.event(line)

    def incident(self, line: Line) -> None:
        with self.series.lock:
            self._trouble.incident(line)

    def sample(self, line: Line) -> None:
        with self.series.lock:
            self._machines.take(line)
        self._time.look()
        self._serve()

    def close(self) -> None:
        """Stop answering. The last state stays in a file, for what comes too late to be scraped."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=5.0)
            self._server = None
        self._time.make_up()
        file = self._run.path / "telemetry" / "metrics.prom"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(file), self.series.registry)

    def _refresh(self) -> None:
        self._machines.show()
        self._trouble.settle(time.time())

    def _serve(self) -> None:
        host, port = self._section.host, self._section.port
        if not port or self._server is not None or time.monotonic() < self._tried + RETRY_SECONDS:
            return
        self._tried = time.monotonic()
        try:
            self._server = start_http_server(port, addr=host, registry=self.series.registry)
        except OSError as error:
            if not self._told:
                log.warning("Prometheus has no page at %s:%d yet: %s", host, port, error.strerror or error)
            self._told = True


class TimeSeries:
    """Where the time since launch went. The books are made up from all files of the run: now and then, and not while
    somebody waits for the page.
    """

    MIN_SECONDS, SHARE = 10.0, 0.01  # between two looks, which take at most this share of one core

    def __init__(self, run: RunDirectory, series: Series) -> None:
        self._run, self._series = run, series
        self._next = 0.0

    def look(self) -> None:
        """Make the books up when they are old."""
        began = time.monotonic()
        if began >= self._next:
            self.make_up()
            self._next = began + max(self.MIN_SECONDS, (time.monotonic() - began) / self.SHARE)

    def make_up(self) -> None:
        with contextlib.suppress(OSError, LookupError, ValueError):  # files of a run that only begins, or is torn
            ledger = ledger_of(self._run)
            with self._series.lock:
                self._series.set("goodput_ratio", ledger.goodput)
                for category, seconds in ledger.seconds.items():
                    self._series.set("time_seconds", seconds, category=category)


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> PrometheusSink:
    return PrometheusSink(run, telemetry.prometheus, steps=run.read_recipe().train.steps)

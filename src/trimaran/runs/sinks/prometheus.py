"""Serves the metrics of one run to Prometheus, with the names of `metric_catalogue.py`."""

import logging
import threading
import time
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server, write_to_textfile

from trimaran.core import PrometheusSection, TelemetrySection
from trimaran.runs.read.ledger import Ledger, LedgerPoller
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.run_records import read_attempts
from trimaran.runs.sinks.series import DecisionSeries, IncidentSeries, MachineSeries, RunSeries, Series
from trimaran.runs.sinks.sink import Line

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # between attempts to open the port


class PrometheusSink:
    """Serves a run's metrics on a port; without a port, they are only written to a file at the end.

    If the port is taken, it is tried again after `retry_seconds`, and no data is lost meanwhile.
    """

    name = "prometheus"

    def __init__(
        self, run: RunDirectory, section: PrometheusSection, *, steps: int = 0, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self.series = Series(run.location.name)
        self._run, self._section = run, section
        self._training = RunSeries(self.series, steps=steps)
        self._incidents = IncidentSeries(self.series)
        self._machines = MachineSeries(self.series)
        self._decisions = DecisionSeries(self.series, run)
        self._ledger = LedgerPoller(run)
        for each in read_attempts(run).attempts[-1:]:
            if each.ended is None:  # it began before this sink was opened
                self._training.start(each.number, {"world_size": each.world_size})
        self.series.before_scrape = self._refresh
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._tried, self._warned, self._retry_seconds = -retry_seconds, False, retry_seconds
        self._serve()

    def step(self, line: Line) -> None:
        with self.series.lock:
            self._training.step(line)
        self._update()

    def event(self, line: Line) -> None:
        with self.series.lock:
            self._training.event(line)
            self._incidents.event(line)

    def incident(self, line: Line) -> None:
        with self.series.lock:
            self._incidents.incident(line)

    def sample(self, line: Line) -> None:
        with self.series.lock:
            self._machines.take(line)
        self._update()

    def close(self) -> None:
        """Stop serving, and write the final values to a file, because they may never be scraped."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=5.0)
            self._server = None
        self._show_time(self._ledger.read())
        with self.series.lock:
            self._decisions.poll()
        file = self._run.path / "telemetry" / "metrics.prom"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(file), self.series.registry)

    def _update(self) -> None:
        with self.series.lock:
            self._decisions.poll()
        self._show_time(self._ledger.poll())
        self._serve()

    def _show_time(self, ledger: Ledger | None) -> None:
        """Set the ledger's series. Not done during a scrape, because reading the ledger takes time."""
        if ledger is None:
            return
        with self.series.lock:
            self.series.set("goodput_ratio", ledger.goodput)
            for category, seconds in ledger.seconds.items():
                self.series.set("time_seconds", seconds, category=category)

    def _refresh(self) -> None:
        self._machines.show()
        self._incidents.settle(time.time())

    def _serve(self) -> None:
        host, port = self._section.host, self._section.port
        if not port or self._server is not None or time.monotonic() < self._tried + self._retry_seconds:
            return
        self._tried = time.monotonic()
        try:
            self._server = start_http_server(port, addr=host, registry=self.series.registry)
        except OSError as error:
            if not self._warned:
                log.warning("cannot serve metrics at %s:%d yet: %s", host, port, error.strerror or error)
            self._warned = True


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> PrometheusSink:
    return PrometheusSink(run, telemetry.prometheus, steps=run.read_recipe().train.steps)

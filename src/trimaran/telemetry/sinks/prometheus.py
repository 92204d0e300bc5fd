"""A page that a Prometheus server reads: the numbers of one run, by the names of `catalogue.py`."""

import logging
import threading
import time
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server, write_to_textfile

from trimaran.core import TelemetrySection
from trimaran.core.recipe import PrometheusSection
from trimaran.run.attempts import read_attempts
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.ledger import Ledger
from trimaran.telemetry.sinks.goodput import GoodputAccount
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
        self._account = GoodputAccount(run)
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
        self._show_time(self._account.look())
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
        self._show_time(self._account.look())
        self._serve()

    def close(self) -> None:
        """Stop answering. The last state stays in a file, for what comes too late to be scraped."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=5.0)
            self._server = None
        self._show_time(self._account.make_up())
        file = self._run.path / "telemetry" / "metrics.prom"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(file), self.series.registry)

    def _show_time(self, ledger: Ledger | None) -> None:
        """Show where the time went. Not while somebody waits for the page: the files are read for it."""
        if ledger is None:
            return
        with self.series.lock:
            self.series.set("goodput_ratio", ledger.goodput)
            for category, seconds in ledger.seconds.items():
                self.series.set("time_seconds", seconds, category=category)

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


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> PrometheusSink:
    return PrometheusSink(run, telemetry.prometheus, steps=run.read_recipe().train.steps)

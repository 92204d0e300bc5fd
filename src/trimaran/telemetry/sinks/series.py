"""The time series of one run, held in a registry of their own."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

from trimaran.telemetry.sinks.metric_catalogue import CATALOGUE, MOST_SERIES, STEP_BUCKETS, Metric

PREFIX = "trimaran_"
_MAKERS: dict[str, Any] = {
    "gauge": prometheus_client.Gauge,
    "counter": prometheus_client.Counter,
    "summary": prometheus_client.Summary,
    "histogram": prometheus_client.Histogram,
}


class Series:
    """All metrics of the catalogue for one run. A scrape, on a thread of its own, never sees half a line.

    A metric without a value so far has no series. `before_scrape` is called with the lock held.
    """

    def __init__(self, run: str) -> None:
        self.run, self.lock = run, threading.RLock()
        self.before_scrape: Callable[[], None] = lambda: None
        self.registry = _Registry(self)
        prometheus_client.disable_created_metrics()
        self._made = {name: self._make(name, metric) for name, metric in CATALOGUE.items()}
        self._known: dict[str, set[tuple[str, ...]]] = {name: set() for name in CATALOGUE}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Show `value`; None, which is how lines write what is not finite, shows nothing new."""
        if value is not None and (child := self._child(name, labels)):
            child.set(value)

    def add(self, name: str, value: float | None = 1, **labels: str) -> None:
        if value is not None and value >= 0 and (child := self._child(name, labels)):
            child.inc(value)

    def observe(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None and (child := self._child(name, labels)):
            child.observe(value)

    def clear(self, *names: str) -> None:
        """Forget the series of these metrics: who is not set again is not shown any more."""
        for name in names:
            self._made[name].clear()
            self._known[name].clear()

    def _child(self, name: str, labels: dict[str, str]) -> Any:
        """Return the series, or None when the metric has as many as it may."""
        wanted = CATALOGUE[name].labels
        values = tuple(labels.get(each, "") for each in wanted)
        assert labels.keys() <= set(wanted), f"{name} has no label {sorted(labels.keys() - set(wanted))}"
        known = self._known[name]
        if values not in known:
            if len(known) >= MOST_SERIES:
                self.add("dropped_series")
                return None
            known.add(values)
        return self._made[name].labels(self.run, *values)

    def _make(self, name: str, metric: Metric) -> Any:
        more = {"buckets": STEP_BUCKETS} if metric.kind == "histogram" else {}
        labels = ("run", *metric.labels)
        return _MAKERS[metric.kind](PREFIX + name, metric.meaning, labels, registry=self.registry, **more)


class _Registry(CollectorRegistry):
    def __init__(self, series: Series) -> None:
        super().__init__()
        self._series = series

    def collect(self) -> Iterable[Family]:
        with self._series.lock:
            self._series.before_scrape()
            return list(super().collect())

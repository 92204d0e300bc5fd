"""The Prometheus time series of one run, in their own registry."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family

from trimaran.runs.sinks.metric_catalogue import CATALOGUE, MAX_SERIES_PER_METRIC, STEP_BUCKETS, Metric

PREFIX = "trimaran_"
_METRIC_CLASSES: dict[str, Any] = {
    "gauge": prometheus_client.Gauge,
    "counter": prometheus_client.Counter,
    "summary": prometheus_client.Summary,
    "histogram": prometheus_client.Histogram,
}


class Series:
    """All metrics of the catalogue for one run. Scrapes run in another thread; the lock keeps lines atomic.

    A metric without a value has no series. `before_scrape` is called with the lock held.
    """

    def __init__(self, run: str) -> None:
        self.run, self.lock = run, threading.RLock()
        self.before_scrape: Callable[[], None] = lambda: None
        self.registry = _Registry(self)
        prometheus_client.disable_created_metrics()
        self._metrics = {name: self._make(name, metric) for name, metric in CATALOGUE.items()}
        self._label_values: dict[str, set[tuple[str, ...]]] = {name: set() for name in CATALOGUE}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set the series to `value`. None, which lines have for NaN and Inf, changes nothing."""
        if value is not None and (child := self._child(name, labels)):
            child.set(value)

    def add(self, name: str, value: float | None = 1, **labels: str) -> None:
        if value is not None and value >= 0 and (child := self._child(name, labels)):
            child.inc(value)

    def observe(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None and (child := self._child(name, labels)):
            child.observe(value)

    def clear(self, *names: str) -> None:
        """Remove all series of these metrics."""
        for name in names:
            self._metrics[name].clear()
            self._label_values[name].clear()

    def _child(self, name: str, labels: dict[str, str]) -> Any:
        """Return the series with these labels, or None if the metric already has too many."""
        names = CATALOGUE[name].labels
        values = tuple(labels.get(each, "") for each in names)
        assert labels.keys() <= set(names), f"{name} has no label {sorted(labels.keys() - set(names))}"
        known = self._label_values[name]
        if values not in known:
            if len(known) >= MAX_SERIES_PER_METRIC:
                self.add("dropped_series")
                return None
            known.add(values)
        return self._metrics[name].labels(self.run, *values)

    def _make(self, name: str, metric: Metric) -> Any:
        more = {"buckets": STEP_BUCKETS} if metric.kind == "histogram" else {}
        labels = ("run", *metric.labels)
        return _METRIC_CLASSES[metric.kind](PREFIX + name, metric.meaning, labels, registry=self.registry, **more)


class _Registry(CollectorRegistry):
    def __init__(self, series: Series) -> None:
        super().__init__()
        self._series = series

    def collect(self) -> Iterable[Family]:
        with self._series.lock:
            self._series.before_scrape()
            return list(super().collect())

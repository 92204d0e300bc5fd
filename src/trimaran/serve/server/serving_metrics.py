"""What a server measures, for Prometheus: queue, pages, tokens, times and errors."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
NEXT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
# Counts of the engine since its start, and what they are called here.
ENGINE_COUNTS = {
    "prompt_tokens": "Tokens of prompts that were computed or reused.",
    "generated_tokens": "Tokens that were generated.",
    "prefix_hit_tokens": "Tokens of prompts that were reused from the cache.",
    "preemptions": "Requests whose pages were taken away and that were computed again.",
}


class TokenTimes(Collector):
    """A histogram of seconds for one thread: without locks, since it is observed for every token."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, (*bounds, float("inf"))
        self._counts, self._sum = [0] * len(self._bounds), 0.0
        self._created = time.time()

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [floatToGoString(each) for each in self._bounds]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family


class ServingMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"trimaran_serve_{name}", text, registry=registry)
            for name, text in (
                ("waiting_requests", "Requests that wait for the engine."),
                ("running_requests", "Requests that the engine works on."),
                ("used_pages", "Pages of the key-value cache in use."),
                ("pages", "Pages of the key-value cache."),
                ("ready", "1 if the engine is ready."),
            )
        }
        self._counts = {
            name: Counter(f"trimaran_serve_{name}", text, registry=registry) for name, text in ENGINE_COUNTS.items()
        }
        self._requests = Counter("trimaran_serve_requests", "Answers by path and status.", ["path", "status"],
                                 registry=registry)  # fmt: skip
        self._errors = Counter("trimaran_serve_errors", "Errors by code.", ["code"], registry=registry)
        self.restarts = Counter("trimaran_serve_engine_restarts", "Deaths of the engine.", registry=registry)
        self.weight_changes = Counter("trimaran_serve_weight_changes", "Weights loaded after the start.",
                                      registry=registry)  # fmt: skip
        self.disconnects = Counter("trimaran_serve_disconnects", "Requests whose client went away.", registry=registry)
        self._first = Histogram("trimaran_serve_time_to_first_token_seconds", "From the request to its first token.",
                                buckets=FIRST_SECONDS, registry=registry)  # fmt: skip
        self._next = TokenTimes("trimaran_serve_time_between_tokens_seconds", "Between two tokens of a request.",
                                NEXT_SECONDS)  # fmt: skip
        registry.register(self._next)
        self._last_counts: dict[str, float] = {}

    def observe_output(self, seconds: float, is_first: bool) -> None:
        (self._first if is_first else self._next).observe(seconds)

    def observe_answer(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def observe_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def set_gauges(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].set(value)

    def add_counts(self, totals: Mapping[str, float]) -> None:
        """Add what an engine has counted since its last message; one that was restarted counts from 0."""
        for name, counter in self._counts.items():
            total, last = totals.get(name, 0.0), self._last_counts.get(name, 0.0)
            counter.inc(total - last if total >= last else total)
            self._last_counts[name] = total

    def text(self) -> bytes:
        return generate_latest(self._registry)

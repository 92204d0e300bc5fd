"""OpenTelemetry: one span per attempt, with its events and incidents as span events. There are no spans for steps."""

import json
import platform
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Status, StatusCode

from trimaran.core import TelemetrySection
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.run_records import read_attempts
from trimaran.runs.sinks.sink import Line, ReportedIncidents

EVENT_KINDS = {"resume", "ready", "started", "skip", "differ", "rewind", "saved", "stop", "error", "done"}
STATUS_BY_EVENT = {"done": StatusCode.OK, "stop": StatusCode.OK, "error": StatusCode.ERROR}
MAX_EVENTS_PER_SPAN = 1000
LATE_LINE_SECONDS = 30.0  # after the next attempt began, no more lines of an attempt are expected
EXPORT_TIMEOUT_SECONDS = 2.0


@dataclass(slots=True)
class AttemptSpan:
    """The open span of an attempt; `last` is the newest time of its lines."""

    span: Span
    last: float
    step: int = 0


class OtelSink:
    """Holds the span of the current attempt, and exports it some time after the next attempt started, or at the end.

    `k8s.*` and other resource attributes come from OTEL_RESOURCE_ATTRIBUTES, which the library reads itself.
    """

    name = "otel"

    def __init__(self, run: RunDirectory, exporter: SpanExporter) -> None:
        attributes = {"service.name": "trimaran", "service.instance.id": run.location.name}
        attributes["host.name"] = platform.node()
        self._provider = TracerProvider(
            resource=Resource.create(attributes),
            span_limits=SpanLimits(max_events=MAX_EVENTS_PER_SPAN),
            shutdown_on_exit=False,
        )
        timeout = EXPORT_TIMEOUT_SECONDS * 1000
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=timeout))
        self._tracer = self._provider.get_tracer("trimaran")
        self._reported, self._run = ReportedIncidents(run, self.name), run.location.name
        self._attempts: dict[int, AttemptSpan] = {}
        self._early: dict[int, list[Line]] = {}  # incidents whose attempt's start event has not arrived
        for each in read_attempts(run).attempts[-1:]:
            if each.ended is None:  # it began before this sink was opened
                self._begin(each.number, each.time, {"world_size": each.world_size})

    def step(self, line: Line) -> None:
        when = line.get("time", 0.0)
        if self._attempts:
            attempt = self._attempts[max(self._attempts)]
            attempt.step, attempt.last = line["step"], max(attempt.last, when)
        self._export_ended(when)

    def event(self, line: Line) -> None:
        number, kind, rank = line.get("attempt", 0), line["kind"], line.get("rank", 0)
        if kind == "start" and number not in self._attempts:
            self._begin(number, line["time"], line.get("data", {}))
        attempt = self._attempts.get(number)
        if attempt is None or (rank != 0 and kind != "error"):
            return
        attempt.last = max(attempt.last, line["time"])
        if kind in EVENT_KINDS:
            named = {
                f"trimaran.{name}": _plain(value) for name, value in line.get("data", {}).items() if value is not None
            }
            attempt.span.add_event(
                kind,
                {"trimaran.rank": line.get("rank", 0), "trimaran.step": line.get("step", 0)} | named,
                timestamp=_nanoseconds(line["time"]),
            )
        if kind in STATUS_BY_EVENT:
            attempt.span.set_status(Status(STATUS_BY_EVENT[kind], line.get("data", {}).get("message")))

    def incident(self, line: Line) -> None:
        """Add the incident to its attempt's span, once when it happens and once more with the action taken."""
        attempt = self._attempts.get(line.get("attempt", 0))
        if attempt is None:
            self._early.setdefault(line.get("attempt", 0), []).append(line)
        elif not self._reported.contains(line):
            names = ("id", "cause", "what", "action", "step", "suspects", "victims")
            fields = {f"trimaran.incident.{name}": _plain(line[name]) for name in names if line.get(name) is not None}
            attempt.span.add_event("incident", fields, timestamp=_nanoseconds(line["time"]))
            attempt.last = max(attempt.last, line["time"])
            self._reported.add(line)

    def sample(self, line: Line) -> None:
        """Export ended attempts; samples themselves are not in spans."""
        self._export_ended(line.get("time", 0.0))

    def close(self) -> None:
        for number in sorted(self._attempts):
            self._export(number)
        self._provider.shutdown()

    def _begin(self, number: int, when: float, data: dict[str, Any]) -> None:
        attributes = {"trimaran.runs": self._run, "trimaran.attempt": number}
        attributes |= {f"trimaran.{name}": data[name] for name in ("world_size", "version", "device") if name in data}
        span = self._tracer.start_span(f"attempt {number}", attributes=attributes, start_time=_nanoseconds(when))
        self._attempts[number] = AttemptSpan(span, when)
        for line in self._early.pop(number, ()):
            self.incident(line)

    def _export_ended(self, now: float) -> None:
        """Export all attempts but the latest, once no more of their lines are expected."""
        if len(self._attempts) > 1 and now > self._attempts[max(self._attempts)].last + LATE_LINE_SECONDS:
            for number in sorted(self._attempts)[:-1]:
                self._export(number)

    def _export(self, number: int) -> None:
        attempt = self._attempts.pop(number)
        attempt.span.set_attribute("trimaran.step", attempt.step)
        attempt.span.end(end_time=_nanoseconds(attempt.last))


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> OtelSink:
    return OtelSink(
        run, OTLPSpanExporter(endpoint=f"{telemetry.otel.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_SECONDS)
    )

"""Logs for Elasticsearch: `logs/ecs.jsonl`, one document a line, in the names of the Elastic Common Schema.

Events of the ranks, incidents, and what ranks and supervisor printed. Numbers of steps are for metrics, not for logs.
"""

import json
import platform
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimaran.core import TelemetrySection
from trimaran.run.journal import LineFollower, LineWriter
from trimaran.run.run_directory import RunDirectory
from trimaran.telemetry.sinks.reported_incidents import ReportedIncidents
from trimaran.telemetry.sinks.sink import Line

ECS_VERSION = "8.11.0"
LOOK_SECONDS = 1.0  # between looks at what was printed
BACKLOG_BYTES = 1 << 16  # of a log that was there before the sink was
MOST_TRACE_LINES = 200

LEVELS = {"error": "error", "skip": "warn", "differ": "error", "bad_sample": "warn", "rewind": "warn"}
COSTLY = {"restarted", "replanned", "resized", "rewound", "stopped"}
PRINTED = re.compile(
    r"(?:(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) )?"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<logger>[\w.]+): (?P<message>.*)"
)
LEVEL_NAMES = {"WARNING": "warn"}
RAISED = re.compile(r"(?P<type>[\w.]+(?:Error|Exception|Interrupt|Exit|Warning)\w*)(?:: (?P<message>.*))?$")
TRACEBACK = "Traceback (most recent call last):"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class EcsSink:
    """Writes one document for each thing that was said. What was printed is read from the logs of the run."""

    name = "ecs"

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._told = run, ReportedIncidents(run, self.name)
        self._writer = LineWriter(run.path / "logs" / "ecs.jsonl")
        self._printed: dict[Path, PrintedLog] = {}
        self._looked, self._attempt, self._step = -LOOK_SECONDS, 0, 0

    def step(self, line: Line) -> None:
        self._step = line["step"]
        self._read_logs()

    def event(self, line: Line) -> None:
        kind, data = line["kind"], line.get("data", {})
        self._attempt = max(self._attempt, line.get("attempt", 0))
        message = data.get("message") or data.get("reason") or data.get("what") or f"rank {line.get('rank')}: {kind}"
        more: dict[str, Any] = {"event.kind": "event", "event.action": kind, "event.dataset": "trimaran.event"}
        if kind == "error":
            more |= {"error.type": data.get("type") or data.get("code"), "error.message": str(message)}
        about = {"rank": line.get("rank"), "attempt": line.get("attempt", 0), "step": line.get("step", 0)}
        more["trimaran.event"] = json.dumps(data, ensure_ascii=False)  # its keys differ from kind to kind
        self._write(line["time"], LEVELS.get(kind, "info"), str(message), about, more)
        self._read_logs()

    def incident(self, line: Line) -> None:
        if self._told.knows(line):
            return
        action = line.get("action")
        level = "error" if action in COSTLY or action is None else "warn"
        about = {"attempt": line.get("attempt", 0), "step": line.get("step", 0), "incident": line["id"]}
        about |= {"cause": line.get("cause"), "suspects": ",".join(map(str, line.get("suspects", ()))) or None}
        more = {"event.kind": "alert", "event.action": action or "noticed", "event.dataset": "trimaran.incident"}
        self._write(line["time"], level, str(line.get("what")), about, more)
        self._told.add(line)

    def sample(self, line: Line) -> None:
        """Numbers of machines are for metrics; it is time to look at the logs."""
        self._read_logs()

    def close(self) -> None:
        self._read_logs(last=True)
        self._writer.close()

    def _read_logs(self, *, last: bool = False) -> None:
        if not last and time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for path in sorted((self._run.path / "logs").glob("*.log")):
            if path not in self._printed:
                self._printed[path] = PrintedLog(path)
            log = self._printed[path]
            for when, level, message, more in log.new(last=last):
                about = {"rank": log.rank, "attempt": self._attempt, "step": self._step}
                more |= {"event.kind": "event", "event.dataset": "trimaran.log", "log.file.path": f"logs/{path.name}"}
                self._write(when, level, message, about, more)

    def _write(self, when: float, level: str, message: str, about: dict[str, Any], more: dict[str, Any]) -> None:
        labels = {f"labels.{name}": str(value) for name, value in about.items() if value is not None}
        document = {
            "@timestamp": datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "log.level": level,
            "message": message,
            "ecs.version": ECS_VERSION,
            "service.name": "trimaran",
            "host.name": platform.node(),
            "labels.run": self._run.path.name,
        }
        self._writer.write(document | labels | {key: value for key, value in more.items() if value is not None})


class PrintedLog:
    """A log that somebody prints into, as messages; a traceback is one of them."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path, backlog=BACKLOG_BYTES)
        rank = re.fullmatch(r"rank-(\d+)\.log", path.name)
        self.rank = int(rank[1]) if rank else None
        self._trace: list[str] = []

    def new(self, *, last: bool = False) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
        """Yield (time, level, message, fields of ECS). What says no time is as old as this look."""
        for line in self._lines.new():
            text = CONTROL.sub("", line.decode("utf-8", errors="replace").rstrip().rsplit("\r", 1)[-1])
            if text.startswith(TRACEBACK) or (self._trace and text[:1] in ("", " ")):
                self._trace = [*self._trace, text][-MOST_TRACE_LINES:]
            elif self._trace:
                yield self._raised(text)
            elif text:
                yield _said(text)
        if last and self._trace:
            yield self._raised("")

    def _raised(self, text: str) -> tuple[float, str, str, dict[str, Any]]:
        trace, self._trace = "\n".join([*self._trace, text]).rstrip(), []
        raised = RAISED.match(text)
        named = {"error.type": raised["type"], "error.message": raised["message"]} if raised else {}
        return time.time(), "error", text or TRACEBACK, named | {"error.stack_trace": trace}


def _said(text: str) -> tuple[float, str, str, dict[str, Any]]:
    found = PRINTED.fullmatch(text)
    if found is None:
        return time.time(), "info", text, {}
    # The time of a log line is the machine's own, without a zone.
    when = datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp() if found["time"] else time.time()
    level = LEVEL_NAMES.get(found["level"], found["level"].lower())
    return when, level, found["message"], {"log.logger": found["logger"]}


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> EcsSink:
    return EcsSink(run)

"""Logs for Elasticsearch: `logs/ecs.jsonl`, one document per line, with the field names of the Elastic Common Schema.

It has the ranks' events, the incidents, and the log output of ranks and supervisor, but no step metrics.
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
from trimaran.runs.line_files import LineWriter
from trimaran.runs.read.run_reader import RunReader
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.sink import Line, ReportedIncidents

ECS_VERSION = "8.11.0"
POLL_SECONDS = 1.0  # between polls of the log files
BACKLOG_BYTES = 1 << 16  # read from the end of a log that existed before the sink
MAX_TRACEBACK_LINES = 200

LEVELS = {"error": "error", "skip": "warn", "differ": "error", "bad_sample": "warn", "rewind": "warn"}
ERROR_ACTIONS = {"restarted", "replanned", "resized", "rewound", "stopped"}
LOG_LINE = re.compile(
    r"(?:(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) )?"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<logger>[\w.]+): (?P<message>.*)"
)
LEVEL_NAMES = {"WARNING": "warn"}
EXCEPTION = re.compile(r"(?P<type>[\w.]+(?:Error|Exception|Interrupt|Exit|Warning)\w*)(?:: (?P<message>.*))?$")
TRACEBACK = "Traceback (most recent call last):"
CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class EcsSink:
    """Writes one document per event, incident and log message. Log output is read from the run's log files."""

    name = "ecs"

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._reported = run, ReportedIncidents(run, self.name)
        self._writer = LineWriter(run.path / "logs" / "ecs.jsonl")
        self._reader, self._logs = RunReader(run), dict[Path, LogFile]()
        self._polled, self._attempt, self._step = -POLL_SECONDS, 0, 0

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
        labels = {"rank": line.get("rank"), "attempt": line.get("attempt", 0), "step": line.get("step", 0)}
        more["trimaran.event"] = json.dumps(data, ensure_ascii=False)  # as text, because its keys differ by kind
        self._write(line["time"], LEVELS.get(kind, "info"), str(message), labels, more)
        self._read_logs()

    def incident(self, line: Line) -> None:
        if self._reported.contains(line):
            return
        action = line.get("action")
        level = "error" if action in ERROR_ACTIONS or action is None else "warn"
        labels = {"attempt": line.get("attempt", 0), "step": line.get("step", 0), "incident": line["id"]}
        labels |= {"cause": line.get("cause"), "suspects": ",".join(map(str, line.get("suspects", ()))) or None}
        more = {"event.kind": "alert", "event.action": action or "noticed", "event.dataset": "trimaran.incident"}
        self._write(line["time"], level, str(line.get("what")), labels, more)
        self._reported.add(line)

    def sample(self, line: Line) -> None:
        """Poll the log files; samples themselves are not logged."""
        self._read_logs()

    def close(self) -> None:
        self._read_logs(last=True)
        self._writer.close()

    def _read_logs(self, *, last: bool = False) -> None:
        if not last and time.monotonic() < self._polled + POLL_SECONDS:
            return
        self._polled = time.monotonic()
        for path in sorted((self._run.path / "logs").glob("*.log")):
            if path not in self._logs:
                self._logs[path] = LogFile(self._reader, path)
            log = self._logs[path]
            for when, level, message, more in log.new(last=last):
                labels = {"rank": log.rank, "attempt": self._attempt, "step": self._step}
                more |= {"event.kind": "event", "event.dataset": "trimaran.log", "log.file.path": f"logs/{path.name}"}
                self._write(when, level, message, labels, more)

    def _write(self, when: float, level: str, message: str, labels: dict[str, Any], more: dict[str, Any]) -> None:
        named = {f"labels.{name}": str(value) for name, value in labels.items() if value is not None}
        document = {
            "@timestamp": datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "log.level": level,
            "message": message,
            "ecs.version": ECS_VERSION,
            "service.name": "trimaran",
            "host.name": platform.node(),
            "labels.run": self._run.location.name,
        }
        self._writer.write(document | named | {key: value for key, value in more.items() if value is not None})


class LogFile:
    """A log file as messages; a traceback is one message."""

    def __init__(self, reader: RunReader, path: Path) -> None:
        self._reader, self._path = reader.follow(path, backlog=BACKLOG_BYTES), path
        rank = re.fullmatch(r"rank-(\d+)\.log", path.name)
        self.rank = int(rank[1]) if rank else None
        self._traceback: list[str] = []

    def new(self, *, last: bool = False) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
        """Yield (time, level, message, ECS fields) of new messages. A message without a time gets the current one."""
        for line in self._reader.lines(self._path):
            text = CONTROL_CHARACTERS.sub("", line.decode("utf-8", errors="replace").rstrip().rsplit("\r", 1)[-1])
            if text.startswith(TRACEBACK) or (self._traceback and text[:1] in ("", " ")):
                self._traceback = [*self._traceback, text][-MAX_TRACEBACK_LINES:]
            elif self._traceback:
                yield self._exception(text)
            elif (found := LOG_LINE.fullmatch(text)) is not None:
                when = time.time()
                if found["time"]:  # local, without a time zone
                    when = datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                level = LEVEL_NAMES.get(found["level"], found["level"].lower())
                yield when, level, found["message"], {"log.logger": found["logger"]}
            elif text:
                yield time.time(), "info", text, {}
        if last and self._traceback:
            yield self._exception("")

    def _exception(self, text: str) -> tuple[float, str, str, dict[str, Any]]:
        traceback, self._traceback = "\n".join([*self._traceback, text]).rstrip(), []
        match = EXCEPTION.match(text)
        named = {"error.type": match["type"], "error.message": match["message"]} if match else {}
        return time.time(), "error", text or TRACEBACK, named | {"error.stack_trace": traceback}


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> EcsSink:
    return EcsSink(run)

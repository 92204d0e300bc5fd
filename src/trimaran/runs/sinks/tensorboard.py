"""Writes TensorBoard event files to `tensorboard/` in the run directory."""

import json
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trimaran.core import TelemetrySection
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.goodput import LedgerPoller, time_scalars
from trimaran.runs.sinks.rate_limit import RateLimit
from trimaran.runs.sinks.reported_incidents import ReportedIncidents
from trimaran.runs.sinks.scalars import scalars
from trimaran.runs.sinks.sink import Line

# Generated when the library is imported, so type checkers do not see their members.
_events: Any = event_pb2
_summaries: Any = summary_pb2
_tensors: Any = tensor_pb2

FLUSH_SECONDS = 10.0
EVENT_KINDS = {"start", "resume", "rewind", "skip", "differ", "error", "stop", "done"}  # that explain a curve


class TensorBoardSink:
    """Writes a chart for each scalar. Replayed steps replace the earlier ones."""

    name = "tensorboard"

    def __init__(self, run: RunDirectory) -> None:
        self._writer = EventFileWriter(str(run.path / "tensorboard"), flush_secs=FLUSH_SECONDS)
        self._reported = ReportedIncidents(run, self.name)
        self._rate_limit, self._ledger = RateLimit(), LedgerPoller(run)
        self._step: int | None = None
        self._flushed = time.monotonic()

    def step(self, line: Line) -> None:
        step, when = line["step"], line.get("time", time.time())
        if self._step is None or step <= self._step:
            # Makes TensorBoard drop this step and later ones, which an earlier attempt wrote.
            self._writer.add_event(
                _events.Event(
                    wall_time=when, step=step, session_log=_events.SessionLog(status=_events.SessionLog.START)
                )
            )
        self._step = step
        if self._rate_limit.passes(line):
            self._write(scalars(line) | time_scalars(self._ledger.poll()), step, when)

    def event(self, line: Line) -> None:
        kind, rank = line["kind"], line.get("rank", 0)
        if kind in EVENT_KINDS:
            what = json.dumps(line.get("data", {}), ensure_ascii=False)
            self._write_text("events", f"rank {rank}: {kind} {what}", line)

    def incident(self, line: Line) -> None:
        if line.get("action") and not self._reported.contains(line):
            text = f"{line['id']} ({line.get('cause')}): {line.get('what')}; {line['action']}"
            self._write_text("incidents", text, line)
            self._reported.add(line)

    def sample(self, line: Line) -> None:
        node = line.get("node", 0)
        named = {f"node-{node}/{name}": value for name, value in scalars(line).items()}
        named |= time_scalars(self._ledger.poll())
        self._write(named, self._step or 0, line.get("time", time.time()))

    def close(self) -> None:
        if last := self._rate_limit.held:
            self._write(scalars(last), last["step"], last.get("time", time.time()))
        if times := time_scalars(self._ledger.read()):
            self._write(times, self._step or 0, time.time())
        self._writer.close()

    def _write(self, values: dict[str, float], step: int, when: float) -> None:
        summary = _summaries.Summary(
            value=[_summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(_events.Event(wall_time=when, step=step, summary=summary))
        if time.monotonic() > self._flushed + FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._writer.flush()

    def _write_text(self, tag: str, text: str, line: Line) -> None:
        metadata = _summaries.SummaryMetadata(plugin_data=_summaries.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = _tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        value = _summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        step = line.get("step") or self._step or 0
        self._writer.add_event(
            _events.Event(wall_time=line["time"], step=step, summary=_summaries.Summary(value=[value]))
        )


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> TensorBoardSink:
    return TensorBoardSink(run)

"""Writes TensorBoard event files to `tensorboard/` in the run directory."""

import json
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trimaran.core import TelemetrySection
from trimaran.runs.read.ledger import time_scalars
from trimaran.runs.run_directory import RunDirectory
from trimaran.runs.sinks.scalar_sink import ScalarSink
from trimaran.runs.sinks.sink import Line

# Generated when the library is imported, so type checkers do not see their members.
_events: Any = event_pb2
_summaries: Any = summary_pb2
_tensors: Any = tensor_pb2

FLUSH_SECONDS = 10.0
EVENT_KINDS = {"start", "resume", "rewind", "skip", "differ", "error", "stop", "done"}  # that explain a curve


class TensorBoardSink(ScalarSink):
    """Writes a chart for each scalar. Replayed steps replace the earlier ones."""

    name = "tensorboard"

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run)
        self._writer = EventFileWriter(str(run.path / "tensorboard"), flush_secs=FLUSH_SECONDS)
        self._has_steps = False
        self._flushed = time.monotonic()

    def step(self, line: Line) -> None:
        step, when = line["step"], line.get("time", time.time())
        if not self._has_steps or step <= self.last_step:
            # Makes TensorBoard drop this step and later ones, which an earlier attempt wrote.
            self._writer.add_event(
                _events.Event(
                    wall_time=when, step=step, session_log=_events.SessionLog(status=_events.SessionLog.START)
                )
            )
        self._has_steps = True
        super().step(line)

    def event(self, line: Line) -> None:
        kind, rank = line["kind"], line.get("rank", 0)
        if kind in EVENT_KINDS:
            what = json.dumps(line.get("data", {}), ensure_ascii=False)
            self._write_text("events", f"rank {rank}: {kind} {what}", line)

    def report(self, incident: Line, what: str) -> None:
        text = f"{incident['id']} ({incident.get('cause')}): {incident.get('what')}; {incident['action']}"
        self._write_text("incidents", text, incident)

    def close(self) -> None:
        self.log_held()
        if times := time_scalars(self.ledger.read()):
            self.log(times, {})
        self._writer.close()

    def log(self, values: dict[str, float], line: Line) -> None:
        step, when = line.get("step", self.last_step), line.get("time", time.time())
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
        step = line.get("step") or self.last_step
        self._writer.add_event(
            _events.Event(wall_time=line["time"], step=step, summary=_summaries.Summary(value=[value]))
        )


def open_sink(telemetry: TelemetrySection, run: RunDirectory) -> TensorBoardSink:
    return TensorBoardSink(run)

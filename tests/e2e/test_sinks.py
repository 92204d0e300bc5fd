"""Every sink is fed a run, and its output is read back with the vendor's own tools."""

import json
import multiprocessing
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("prometheus_client")

from tests.goodput import on_page
from tests.prometheus_server import Server, alerts, filled_in, free_port, panels, prometheus
from tests.runs import new_run
from tests.sink_lines import event_line, feed, incident_line, incidents, recorded, sample_line, step_line
from trimaran.app import main
from trimaran.core import PrometheusSection, TelemetrySection, UserError, fixed_field_changes, parse_recipe
from trimaran.runs import (
    SINKS,
    Line,
    PrometheusSink,
    RunDirectory,
    Sink,
    append_line,
    open_sinks,
    read_ledger,
    refuse_missing_sinks,
)

LIFE = [
    ("event", event_line("start", 1000.0, world_size=2, version="0.1.0", device="cpu")),
    ("step", step_line(1, 1001.0)),
    ("step", step_line(2, 1002.0)),
    ("step", step_line(3, 1003.0)),
    ("sample", sample_line(1003.5)),
    ("event", event_line("error", 1004.0, rank=1, step=3, type="ValueError", message="a bad thing")),
    ("incident", incident_line(1, 1004.0)),
    ("incident", incident_line(1, 1004.0, action="restarted")),
    ("event", event_line("start", 1006.0, attempt=1, world_size=2, version="0.1.0", device="cpu")),
    ("step", step_line(2, 1008.0) | {"loss": 7.0}),
    ("event", event_line("evaluation", 1008.5, attempt=1, step=2, loss=6.5, tokens=512)),
    ("event", event_line("done", 1009.0, attempt=1, step=2, steps=2, seconds=3.0)),
]


@pytest.fixture(scope="module", autouse=True)
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, PrometheusSink] | None]:
    """Yield a server that scrapes a healthy and an unhealthy run, and the sink of the latter.

    A Prometheus server first looks at a page five seconds after its start: the other tests run meanwhile.
    """
    if shutil.which("prometheus") is None:
        yield None
        return
    folder, sinks, ports = tmp_path_factory.mktemp("scraped"), [], [free_port(), free_port()]
    with prometheus(folder / "server", [f"127.0.0.1:{port}" for port in ports]) as server:
        for name, port in zip(("well", "ill"), ports, strict=True):
            run, lines = recorded(folder / name, is_healthy=name == "well")
            sinks.append(PrometheusSink(run, PrometheusSection(port=port), steps=100))
            feed(sinks[-1], lines)
        yield server, sinks[-1]
    for sink in sinks:
        sink.close()


def feed_sinks(run: RunDirectory, asked: dict[str, Any], lines: list[tuple[str, Line]]) -> None:
    (sink,) = open_sinks(TelemetrySection.model_validate(asked), run)
    feed(sink, lines)
    sink.close()


def test_tensorboard_gets_every_scalar_and_replayed_steps_replace_the_first_ones(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run(tmp_path / "toy")
    feed_sinks(run, {"tensorboard": True}, LIFE[:-3])
    feed_sinks(run, {"tensorboard": True}, LIFE[-3:])  # as after a `trimaran resume`
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 5.0), (2, 7.0)]
    assert [each.wall_time for each in found.Scalars("phases/forward")] == [1001.0, 1008.0]
    assert {"memory/allocated", "groups/layers.0/grad_norm", "node-0/gpus/1/power"} <= set(found.Tags()["scalars"])
    incidents_shown = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("incidents")]
    assert incidents_shown == ["i-0001 (crash): rank 1 was killed by SIGKILL; restarted"]


def test_frequent_steps_are_rate_limited_and_the_last_one_is_kept(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run(tmp_path / "toy")
    fast = [step_line(step, 1000 + step / 1000) for step in range(1, 1001)]
    lines = [("step", {key: line[key] for key in line if key != "groups"}) for line in fast]
    feed_sinks(run, {"tensorboard": True}, lines)
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    steps = [each.step for each in found.Scalars("loss")]
    assert 19 <= len(steps) <= 22
    assert steps[-1] == 1000


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a wandb file: 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    data, offset, whole = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if (room := 32768 - offset % 32768) < 7:
            offset += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        if offset + 7 + length > len(data):
            return  # it is still being written
        whole += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield whole
            whole = b""


def read_wandb(run: RunDirectory) -> tuple[list[Any], list[Line]]:
    """Return the records of wandb's file, and the logged rows among them."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    records: list[Any] = []
    until = time.monotonic() + 30
    while not any(record.HasField("exit") for record in records) and time.monotonic() < until:
        time.sleep(0.05)  # wandb's own process finishes writing later than it says
        records = [internal.Record.FromString(each) for each in wandb_records(file)]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return records, rows


def test_wandb_logs_every_step_offline_and_nothing_about_the_machine(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = new_run(tmp_path / "toy")
    asked = {"wandb": {"mode": "offline", "project": "boats"}}
    # In a process of its own: wandb starts threads that live to the end, and one in each process forked later.
    own = multiprocessing.get_context("fork").Process(target=feed_sinks, args=(run, asked, LIFE))
    own.start()
    own.join()
    assert own.exitcode == 0
    records, rows = read_wandb(run)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(1, 5.0), (2, 2.5), (3, 5 / 3), (2, 7.0)]
    assert [row["evaluation/loss"] for row in rows if "evaluation/loss" in row] == [6.5]
    assert any("node-0/gpus/1/power" in row for row in rows)
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.project, started.display_name) == ("boats", "toy")
    assert {item.key for item in started.config.update} == {"recipe", "plan", "_wandb"}
    assert [record.alert.title for record in records if record.HasField("alert")] == ["i-0001 of toy"]
    assert list((run.path / "wandb").glob("offline-run-*/files/*")) == []


class Collector(BaseHTTPRequestHandler):
    """A fake OpenTelemetry collector."""

    taken: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:  # pyrefly: ignore[bad-override]
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.taken.clear()
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def spans_taken() -> list[Any]:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    assert {path for path, _ in Collector.taken} == {"/v1/traces"}
    requests = [service.ExportTraceServiceRequest.FromString(body) for _, body in Collector.taken]
    resources = [each for request in requests for each in request.resource_spans]
    for each in resources:
        named = {item.key: item.value.string_value for item in each.resource.attributes}
        assert (named["service.name"], named["service.instance.id"]) == ("trimaran", "toy")
    return [span for each in resources for scope in each.scope_spans for span in scope.spans]


def test_a_collector_gets_one_span_per_attempt_with_its_events(tmp_path: Path, collector: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    feed_sinks(new_run(tmp_path / "toy"), {"otel": collector}, LIFE)
    first, second = sorted(spans_taken(), key=lambda span: span.start_time_unix_nano)
    assert (first.name, second.name) == ("attempt 0", "attempt 1")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1000 * 10**9, 1004 * 10**9)
    assert [event.name for event in first.events] == ["error", "incident", "incident"]
    about = {item.key: item.value.string_value for item in first.events[-1].attributes}
    assert (about["trimaran.incident.cause"], about["trimaran.incident.action"]) == ("crash", "restarted")
    assert (first.status.code, first.status.message, second.status.code) == (2, "a bad thing", 1)


def test_a_collector_gets_an_attempt_that_began_before_the_sink(tmp_path: Path, collector: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    run = new_run(tmp_path / "toy")
    append_line(run.attempts, {"attempt": 4, "time": 900.0, "world_size": 2, "host": "vm", "pid": 1})
    late = [("incident", incident_line(9, 1004.0, attempt=4)), ("step", step_line(7, 1005.0))]
    feed_sinks(run, {"otel": collector}, late)
    (span,) = spans_taken()
    assert (span.name, span.start_time_unix_nano, len(span.events)) == ("attempt 4", 900 * 10**9, 1)


def documents(run: RunDirectory) -> list[Line]:
    return [json.loads(line) for line in (run.path / "logs" / "ecs.jsonl").read_text().splitlines()]


def test_elasticsearch_gets_events_incidents_and_log_messages(tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    printed = "WARNING trimaran.train.metrics.step_monitor: step 3 was refused\n\x1b[31mplain text\x1b[0m\n"
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: a bad thing\n'
    run.log(1).write_text(printed + trace)
    run.agent_log.write_text("2026-11-15 21:59:48,670 INFO trimaran.launch.supervise.supervisor: start 1\n")
    feed_sinks(run, {"ecs": True}, LIFE)
    logged = documents(run)
    for each in logged:
        assert {"@timestamp", "log.level", "message", "ecs.version", "event.kind", "labels.run"} <= each.keys()
        assert each["labels.run"] == "toy"
    (raised,) = [each for each in logged if "error.stack_trace" in each]
    assert (raised["error.type"], raised["error.message"], raised["labels.rank"]) == ("ValueError", "a bad thing", "1")
    assert raised["error.stack_trace"] == trace.rstrip()
    assert [each["log.level"] for each in logged if each["message"] == "step 3 was refused"] == ["warn"]
    assert [each["message"] for each in logged if each["message"].startswith("plain")] == ["plain text"]
    errors = [each for each in logged if each.get("event.action") == "error"]
    assert [(each["@timestamp"], each["error.type"]) for each in errors] == [("1970-01-01T00:16:44.000Z", "ValueError")]
    alerts = [(each["event.action"], each["labels.cause"]) for each in logged if each["event.kind"] == "alert"]
    assert alerts == [("noticed", "crash"), ("restarted", "crash")]


def test_a_reopened_sink_does_not_report_an_incident_twice(tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    for _ in range(2):  # a new sidecar reads the incidents from the first
        feed_sinks(run, {"ecs": True}, [each for each in LIFE if each[0] == "incident"])
    assert len(documents(run)) == 2


def test_a_reopened_sink_of_charts_does_not_report_an_incident_twice(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run(tmp_path / "toy")
    for _ in range(2):
        feed_sinks(run, {"tensorboard": True}, [each for each in LIFE if each[0] == "incident"])
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert len(found.Tensors("incidents")) == 1


def test_a_recipe_without_sinks_opens_none(tmp_path: Path) -> None:
    assert open_sinks(TelemetrySection(), new_run(tmp_path / "toy")) == []


def test_a_resumed_run_may_change_its_sinks() -> None:
    old = parse_recipe("", name="test")
    new = parse_recipe("", name="test", overrides=["telemetry.tensorboard=true", "telemetry.wandb.mode=offline"])
    assert fixed_field_changes(old, new) == {}


def test_a_sink_that_cannot_be_opened_is_logged_and_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "toy")
    (run.path / "tensorboard").write_text("a file where the folder should be")
    opened: list[Sink] = open_sinks(TelemetrySection(tensorboard=True, ecs=True), run)
    assert [sink.name for sink in opened] == ["ecs"]
    assert "cannot open sink tensorboard" in caplog.text
    opened[0].close()


def test_a_missing_package_is_reported_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in filter(None, (kind.package for kind in SINKS.values())):
        monkeypatch.setitem(sys.modules, package, None)  # so that it is not found
    asked = {"prometheus": {"port": 9101}, "tensorboard": True, "wandb": {"mode": "offline"}, "otel": "http://x",
             "mlflow": {"uri": "http://x"}}  # fmt: skip
    for name, value in asked.items():
        with pytest.raises(UserError) as refused:
            refuse_missing_sinks(TelemetrySection.model_validate({name: value}))
        assert (refused.value.code, refused.value.where) == ("A018", SINKS[name].field)
        assert f"trimaran[{SINKS[name].extra}]" in refused.value.fix
    refuse_missing_sinks(TelemetrySection(ecs=True))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--set", "telemetry.tensorboard=true"]) == 2
    page = Path(__file__).parents[2] / "docs" / "codes" / "A018.md"
    assert capsys.readouterr().err in page.read_text()
    assert list(tmp_path.iterdir()) == []


def test_every_query_has_a_result_and_every_alert_fires_for_the_unhealthy_run(
    scraped: tuple[Server, PrometheusSink] | None,
) -> None:
    if scraped is None:
        pytest.skip("needs the Debian package prometheus")
    server, ill = scraped
    server.wait_for("count_over_time(trimaran_step[1m]) >= 2", answers=2)
    feed(ill, list(incidents(time.time())))
    server.wait_for("increase(trimaran_restarts_total{cause='crash',run='ill'}[1m]) > 2", answers=1)
    for title, query in panels():
        named = {each["metric"].get("run") for each in server.query(filled_in(query, runs="well|ill"))}
        assert named, f"{title}: no answer to {query}"
        assert named <= {"well", "ill", None}
    for name, rule in alerts().items():
        assert {each["metric"]["run"] for each in server.query(rule["expr"])} == {"ill"}, name
        assert server.query(f"count by (run) ({rule['expr']})")[0]["value"][1] == "1"


def last_wandb_goodput(run: RunDirectory) -> float:
    """Return the last goodput that was logged to wandb."""
    return [row["goodput"] for row in read_wandb(run)[1] if "goodput" in row][-1]


@pytest.mark.slow
def test_a_real_run_feeds_every_sink(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    tiny = ["train.steps=30", "train.global_batch=4", "data.seq_len=32", "cluster=2xcpu", "checkpoint.every=10"]
    sinks = [f"telemetry.prometheus.port={free_port()}", "telemetry.tensorboard=true", "telemetry.ecs=true"]
    sinks += ["telemetry.wandb.mode=offline", "telemetry.otel=http://127.0.0.1:9"]  # nothing listens on the last one
    settings = [word for each in [*tiny, *sinks] for word in ("--set", each)]
    assert main(["train", "--quiet", "--run-dir", str(tmp_path / "toy"), *settings]) == 0
    run = RunDirectory(tmp_path / "toy")
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert found.Scalars("loss")[-1].step == 30
    page = (run.path / "telemetry" / "metrics.prom").read_text()
    goodput = read_ledger(run).goodput
    shown = {"page": on_page(page), "tensorboard": found.Scalars("goodput")[-1].value, "wandb": last_wandb_goodput(run)}
    assert shown == pytest.approx(dict.fromkeys(shown, goodput), rel=1e-6)
    for line in ("steps_total", "step", "steps_planned"):
        assert f'trimaran_{line}{{run="toy"}} 30.0' in page
    assert 'trimaran_checkpoints_total{run="toy"} 3.0' in page
    assert 'trimaran_finished{run="toy"} 1.0' in page
    assert {each["event.action"] for each in documents(run) if "event.action" in each} >= {"start", "ready", "done"}

"""Every sink is told a run, and what it made of it is read back with the tools of its own people."""

import json
import shutil
import struct
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
from tests.sink_lines import event_line, feed, incident_line, recorded, sample_line, step_line, troubles
from trimaran.app.main import main
from trimaran.core import TelemetrySection, UserError, changes_of_course, parse_recipe
from trimaran.core.recipe import PrometheusSection
from trimaran.run import RunDirectory, append_line
from trimaran.telemetry.ledger import ledger_of
from trimaran.telemetry.sinks import open as opening
from trimaran.telemetry.sinks.open import SINKS, open_sinks, refuse_missing_sinks
from trimaran.telemetry.sinks.prometheus import PrometheusSink
from trimaran.telemetry.sinks.sink import Line, Sink

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
    """Yield a server that reads the pages of a run that is well and one that is ill, and the page of the latter.

    A Prometheus server first looks at a page five seconds after its start: the other tests run meanwhile.
    """
    if shutil.which("prometheus") is None:
        yield None
        return
    folder, sinks, ports = tmp_path_factory.mktemp("scraped"), [], [free_port(), free_port()]
    with prometheus(folder / "server", [f"127.0.0.1:{port}" for port in ports]) as server:
        for name, port in zip(("well", "ill"), ports, strict=True):
            run, lines = recorded(folder / name, is_well=name == "well")
            sinks.append(PrometheusSink(run, PrometheusSection(port=port), steps=100))
            feed(sinks[-1], lines)
        yield server, sinks[-1]
    for sink in sinks:
        sink.close()


def tell(run: RunDirectory, asked: dict[str, Any], lines: list[tuple[str, Line]]) -> None:
    (sink,) = open_sinks(TelemetrySection.model_validate(asked), run)
    feed(sink, lines)
    sink.close()


def test_tensorboard_draws_every_number_and_a_replay_takes_the_place_of_its_first_try(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run(tmp_path / "toy")
    tell(run, {"tensorboard": True}, LIFE[:-3])
    tell(run, {"tensorboard": True}, LIFE[-3:])  # as after a `trimaran resume`
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 5.0), (2, 7.0)]
    assert [each.wall_time for each in found.Scalars("phases/forward")] == [1001.0, 1008.0]
    assert {"memory/allocated", "groups/layers.0/grad_norm", "node-0/gpus/1/power"} <= set(found.Tags()["scalars"])
    told = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("incidents")]
    assert told == ["i-0001 (crash): rank 1 was killed by SIGKILL; restarted"]


def test_more_steps_than_a_chart_shows_are_thinned_and_the_last_one_stays(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = new_run(tmp_path / "toy")
    fast = [step_line(step, 1000 + step / 1000) for step in range(1, 1001)]
    tell(run, {"tensorboard": True}, [("step", {key: line[key] for key in line if key != "groups"}) for line in fast])
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    steps = [each.step for each in found.Scalars("loss")]
    assert 19 <= len(steps) <= 22
    assert steps[-1] == 1000


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of wandb's: 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    data, offset, whole = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if (room := 32768 - offset % 32768) < 7:
            offset += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        if offset + 7 + length > len(data):
            return  # it is being written
        whole += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # all of it, or the end of it
            yield whole
            whole = b""


def read_wandb(run: RunDirectory) -> tuple[list[Any], list[Line]]:
    """Return what wandb was told, and the rows of numbers among it."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    records: list[Any] = []
    until = time.monotonic() + 30
    while not any(record.HasField("exit") for record in records) and time.monotonic() < until:
        time.sleep(0.05)  # wandb writes in a process of its own, which is not done when it says so
        records = [internal.Record.FromString(each) for each in wandb_records(file)]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return records, rows


def test_wandb_is_told_every_step_without_a_network_and_nothing_of_the_machine(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = new_run(tmp_path / "toy")
    tell(run, {"wandb": {"mode": "offline", "project": "boats"}}, LIFE)
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
    """Takes what an OpenTelemetry collector would."""

    taken: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
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


def test_a_collector_gets_a_span_for_each_attempt_with_what_happened_in_it(tmp_path: Path, collector: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    tell(new_run(tmp_path / "toy"), {"otel": collector}, LIFE)
    first, second = sorted(spans_taken(), key=lambda span: span.start_time_unix_nano)
    assert (first.name, second.name) == ("attempt 0", "attempt 1")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1000 * 10**9, 1004 * 10**9)
    assert [event.name for event in first.events] == ["error", "incident", "incident"]
    about = {item.key: item.value.string_value for item in first.events[-1].attributes}
    assert (about["trimaran.incident.cause"], about["trimaran.incident.action"]) == ("crash", "restarted")
    assert (first.status.code, first.status.message, second.status.code) == (2, "a bad thing", 1)


def test_a_collector_hears_of_an_attempt_that_began_before_its_sink(tmp_path: Path, collector: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    run = new_run(tmp_path / "toy")
    append_line(run.attempts, {"attempt": 4, "time": 900.0, "world_size": 2, "host": "vm", "pid": 1})
    late = [("incident", incident_line(9, 1004.0, attempt=4)), ("step", step_line(7, 1005.0))]
    tell(run, {"otel": collector}, late)
    (span,) = spans_taken()
    assert (span.name, span.start_time_unix_nano, len(span.events)) == ("attempt 4", 900 * 10**9, 1)


def documents(run: RunDirectory) -> list[Line]:
    return [json.loads(line) for line in (run.path / "logs" / "ecs.jsonl").read_text().splitlines()]


def test_elasticsearch_gets_events_incidents_and_what_was_printed(tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    printed = "WARNING trimaran.train.metrics.step_monitor: step 3 was refused\n\x1b[31mplain words\x1b[0m\n"
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: a bad thing\n'
    run.log(1).write_text(printed + trace)
    run.agent_log.write_text("2026-11-15 21:59:48,670 INFO trimaran.launch.supervisor: start 1\n")
    tell(run, {"ecs": True}, LIFE)
    told = documents(run)
    for each in told:
        assert {"@timestamp", "log.level", "message", "ecs.version", "event.kind", "labels.run"} <= each.keys()
        assert each["labels.run"] == "toy"
    (raised,) = [each for each in told if "error.stack_trace" in each]
    assert (raised["error.type"], raised["error.message"], raised["labels.rank"]) == ("ValueError", "a bad thing", "1")
    assert raised["error.stack_trace"] == trace.rstrip()
    assert [each["log.level"] for each in told if each["message"] == "step 3 was refused"] == ["warn"]
    assert [each["message"] for each in told if each["message"].startswith("plain")] == ["plain words"]
    errors = [each for each in told if each.get("event.action") == "error"]
    assert [(each["@timestamp"], each["error.type"]) for each in errors] == [("1970-01-01T00:16:44.000Z", "ValueError")]
    alerts = [(each["event.action"], each["labels.cause"]) for each in told if each["event.kind"] == "alert"]
    assert alerts == [("noticed", "crash"), ("restarted", "crash")]


def test_an_incident_is_not_told_twice_by_a_sink_that_is_opened_again(tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    for _ in range(2):  # a new sidecar reads the incidents from the first
        tell(run, {"ecs": True}, [each for each in LIFE if each[0] == "incident"])
    assert len(documents(run)) == 2


def test_a_recipe_that_asks_for_none_opens_none(tmp_path: Path) -> None:
    assert open_sinks(TelemetrySection(), new_run(tmp_path / "toy")) == []


def test_a_run_that_goes_on_may_tell_others() -> None:
    old = parse_recipe("", name="test")
    new = parse_recipe("", name="test", overrides=["telemetry.tensorboard=true", "telemetry.wandb.mode=offline"])
    assert changes_of_course(old, new) == {}


def test_a_sink_that_cannot_be_opened_is_told_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "toy")
    (run.path / "tensorboard").write_text("a file where the folder should be")
    opened: list[Sink] = open_sinks(TelemetrySection(tensorboard=True, ecs=True), run)
    assert [sink.name for sink in opened] == ["ecs"]
    assert "tensorboard is not told" in caplog.text
    opened[0].close()


def test_a_missing_package_is_told_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    asked = {"prometheus": {"port": 9101}, "tensorboard": True, "wandb": {"mode": "offline"}, "otel": "http://x"}
    for name, value in asked.items():
        with pytest.raises(UserError) as told:
            refuse_missing_sinks(TelemetrySection.model_validate({name: value}))
        assert (told.value.code, told.value.where) == ("A018", SINKS[name].field)
        assert f"trimaran[{SINKS[name].extra}]" in told.value.fix
    refuse_missing_sinks(TelemetrySection(ecs=True))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--set", "telemetry.tensorboard=true"]) == 2
    page = Path(__file__).parents[2] / "docs" / "codes" / "A018.md"
    assert capsys.readouterr().err in page.read_text()
    assert list(tmp_path.iterdir()) == []


def test_every_query_has_an_answer_and_every_alert_finds_the_run_that_is_ill(
    scraped: tuple[Server, PrometheusSink] | None,
) -> None:
    if scraped is None:
        pytest.skip("needs the Debian package prometheus")
    server, ill = scraped
    server.wait_for("count_over_time(trimaran_step[1m]) >= 2", answers=2)
    feed(ill, list(troubles(time.time())))
    server.wait_for("increase(trimaran_restarts_total{cause='crash',run='ill'}[1m]) > 2", answers=1)
    for title, query in panels():
        named = {each["metric"].get("run") for each in server.ask(filled_in(query, runs="well|ill"))}
        assert named, f"{title}: no answer to {query}"
        assert named <= {"well", "ill", None}
    for name, rule in alerts().items():
        assert {each["metric"]["run"] for each in server.ask(rule["expr"])} == {"ill"}, name
        assert server.ask(f"count by (run) ({rule['expr']})")[0]["value"][1] == "1"


def told_last(run: RunDirectory) -> float:
    """Return the goodput that wandb was told last."""
    return [row["goodput"] for row in read_wandb(run)[1] if "goodput" in row][-1]


@pytest.mark.chaos
def test_a_real_run_tells_every_sink(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    tiny = ["train.steps=30", "train.global_batch=4", "data.seq_len=32", "cluster=2xcpu", "checkpoint.every=10"]
    told = [f"telemetry.prometheus.port={free_port()}", "telemetry.tensorboard=true", "telemetry.ecs=true"]
    told += ["telemetry.wandb.mode=offline", "telemetry.otel=http://127.0.0.1:9"]  # nobody listens to the last one
    settings = [word for each in [*tiny, *told] for word in ("--set", each)]
    assert main(["train", "--quiet", "--run-dir", str(tmp_path / "toy"), *settings]) == 0
    run = RunDirectory(tmp_path / "toy")
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert found.Scalars("loss")[-1].step == 30
    page = (run.path / "telemetry" / "metrics.prom").read_text()
    goodput = ledger_of(run).goodput
    shown = {"page": on_page(page), "tensorboard": found.Scalars("goodput")[-1].value, "wandb": told_last(run)}
    assert shown == pytest.approx(dict.fromkeys(shown, goodput), rel=1e-6)
    for line in ("steps_total", "step", "steps_planned"):
        assert f'trimaran_{line}{{run="toy"}} 30.0' in page
    assert 'trimaran_checkpoints_total{run="toy"} 3.0' in page
    assert 'trimaran_finished{run="toy"} 1.0' in page
    assert {each["event.action"] for each in documents(run) if "event.action" in each} >= {"start", "ready", "done"}

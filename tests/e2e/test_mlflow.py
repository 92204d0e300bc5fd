"""The MLflow sink, with MLflow's own tracking server and client."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mlflow_server import mlflow_app, serve_mlflow
from tests.prometheus_server import free_port
from tests.runs import new_run
from tests.sink_lines import event_line, feed, incident_line, sample_line, step_line
from trimaran.core import TelemetrySection, UserError, parse_recipe
from trimaran.runs import RunDirectory, Sink, SinkFeed, open_sinks

FIRST = [
    ("event", event_line("start", 1000.0, world_size=2, version="0.1.0", device="cpu")),
    ("step", step_line(1, 1001.0)),
    ("step", step_line(2, 1002.0)),
    ("sample", sample_line(1002.5)),
    ("incident", incident_line(1, 1004.0)),
    ("incident", incident_line(1, 1004.0, action="restarted")),
    ("event", event_line("stop", 1005.0, step=2, reason="SIGTERM")),
]
SECOND = [
    ("event", event_line("start", 1006.0, attempt=1, world_size=2, version="0.1.0", device="cpu")),
    ("incident", incident_line(1, 1004.0, action="restarted")),
    ("step", step_line(3, 1008.0) | {"loss": 7.0}),
    ("event", event_line("evaluation", 1008.5, attempt=1, step=3, loss=6.5, tokens=512)),
    ("event", event_line("done", 1009.0, attempt=1, step=3, steps=3, seconds=3.0)),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield mlflow_app(tmp_path_factory.mktemp("mlflow"), monkeypatch)


def sink_of(run: RunDirectory, uri: str) -> Sink:
    (sink,) = open_sinks(TelemetrySection.model_validate({"mlflow": {"uri": uri, "experiment": "boats"}}), run)
    return sink


def runs_named(uri: str, name: str) -> list[Any]:
    client = pytest.importorskip("mlflow.tracking").MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("boats")
    return client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'") if experiment else []


def test_a_resumed_run_continues_its_mlflow_run_with_settings_metrics_and_tags(app: Any, tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    with serve_mlflow(app) as uri:
        client = pytest.importorskip("mlflow.tracking").MlflowClient(tracking_uri=uri)
        for lines, status in ((FIRST, "KILLED"), (SECOND, "FINISHED")):
            sink = sink_of(run, uri)
            feed(sink, lines)
            (live,) = runs_named(uri, "toy")
            assert live.info.status == "RUNNING"
            sink.close()
            (found,) = runs_named(uri, "toy")
            assert found.info.status == status
        history = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "loss")]
    params, tags, metrics = found.data.params, found.data.tags, found.data.metrics
    assert history == [(1, 5.0), (2, 2.5), (3, 7.0)]
    assert {"phases/forward", "groups/layers.0/grad_norm", "node-0/gpus/1/power", "evaluation/loss"} <= metrics.keys()
    assert params["recipe.train.steps"] == str(run.read_recipe().train.steps)
    assert params["plan.mesh.dp_replicate"] == str(run.read_plan().mesh.dp_replicate)
    assert tags["trimaran.last_incident"] == tags["trimaran.incident.i-0001"]
    assert json.loads(tags["trimaran.start"])["attempt"] == 1
    ours = {name for name in tags if not name.startswith("mlflow.")}
    assert ours == {"trimaran.run_id", "trimaran.start", "trimaran.stop", "trimaran.done", "trimaran.last_incident",
                    "trimaran.incident.i-0001"}  # fmt: skip
    assert tags.keys() - ours == {"mlflow.runName"}  # no user, no code, no command


def test_lines_wait_for_a_server_that_is_not_there_yet(
    app: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    feeding = SinkFeed(sink_of(new_run(tmp_path / "late"), f"http://127.0.0.1:{port}"), first_delay=0.2)
    began = time.monotonic()
    feeding.put("step", step_line(1, 1001.0))
    assert time.monotonic() - began < 0.1
    while "sink mlflow failed" not in caplog.text:
        assert time.monotonic() < began + 30
        time.sleep(0.02)
    with serve_mlflow(app, port) as uri:
        assert feeding.close(seconds=30)
        (found,) = runs_named(uri, "late")
    assert feeding.lost == 0
    assert found.data.metrics["loss"] == 5.0


@pytest.mark.parametrize(
    ("uri", "fix"), [("https://me:secret@server", "MLFLOW_TRACKING_PASSWORD"), ("server:5000", "http://HOST:PORT")]
)
def test_addresses_with_credentials_or_without_a_scheme_are_refused(uri: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        parse_recipe(f"telemetry: {{mlflow: {{uri: '{uri}'}}}}", name="-")

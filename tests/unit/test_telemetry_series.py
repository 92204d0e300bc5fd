"""The metrics that a run exports to Prometheus."""

import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from tests.runs import new_run
from tests.sink_lines import GIB, event_line, feed, gpu_line, incident_line, recorded, sample_line, step_line
from trimaran.autopilot import DecisionLedger
from trimaran.core import Decision, PrometheusSection
from trimaran.runs import CATALOGUE, MAX_INDIVIDUAL_SERIES, MAX_SERIES_PER_METRIC, PrometheusSink, RunDirectory


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def new_sink(run: RunDirectory, port: int = 0) -> PrometheusSink:
    return PrometheusSink(run, PrometheusSection(port=port), steps=100)


@pytest.fixture
def sink(tmp_path: Path) -> PrometheusSink:
    return new_sink(new_run(tmp_path / "toy"))


def shown(sink: PrometheusSink, name: str, **labels: str) -> list[float]:
    """Return the values of the series with this name and these labels."""
    return [
        sample.value
        for family in sink.series.registry.collect()
        for sample in family.samples
        if sample.name == f"trimaran_{name}" and labels.items() <= sample.labels.items()
    ]


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_names_have_one_prefix_base_units_and_few_labels(sink: PrometheusSink) -> None:
    allowed = {"rank", "attempt", "world_size", "version", "node", "gpu", "uuid", "stat", "phase", "kind", "severity"}
    allowed |= {"cause", "category", "group", "part", "reason", "what", "direction", "axis", "outcome"}
    for name, metric in CATALOGUE.items():
        assert set(metric.labels) <= allowed, name
        assert not name.endswith(("_total", "_ms", "_milliseconds", "_percent", "_mb", "_gb")), name
    for family in sink.series.registry.collect():
        assert family.name.startswith("trimaran_")


def test_gauges_show_the_last_step_and_counters_the_total(tmp_path: Path) -> None:
    run, lines = recorded(tmp_path / "toy", is_healthy=True)
    port = free_port()
    sink = new_sink(run, port)
    feed(sink, lines)
    text = page(port)
    sink.close()
    assert 'trimaran_step{run="toy"} 98.0' in text
    assert f'trimaran_tokens_total{{run="toy"}} {98 * 1024.0}' in text
    assert 'trimaran_attempt_info{attempt="0",run="toy",world_size="4"} 1.0' in text
    assert "_created" not in text
    assert str(tmp_path) not in text
    assert (run.path / "telemetry" / "metrics.prom").read_text().startswith("# HELP trimaran_build_info")


def test_a_repeated_step_is_counted_as_a_replay(sink: PrometheusSink) -> None:
    for step in (1, 2, 3, 2, 3, 4):
        sink.step(step_line(step, 1000.0 + step))
    assert shown(sink, "replayed_steps_total") == [2.0]
    assert shown(sink, "steps_total") == [6.0]
    assert shown(sink, "step") == [4.0]


def test_a_nan_loss_keeps_the_last_value(sink: PrometheusSink) -> None:
    sink.step(step_line(1, 1000.0))
    sink.step(step_line(2, 1001.0) | {"loss": None})
    sink.event(event_line("skip", 1001.0, step=2, loss=None, grad_norm=None))
    sink.event(event_line("skip", 1002.0, step=3, loss=90.0, grad_norm=1.0))
    assert shown(sink, "loss") == [5.0]
    assert shown(sink, "skipped_steps_total", reason="not_finite") == [1.0]
    assert shown(sink, "skipped_steps_total", reason="spike") == [1.0]


def test_an_incident_is_counted_once_under_its_final_cause(sink: PrometheusSink) -> None:
    now = 1000.0
    sink.incident(incident_line(1, now))
    sink.incident(incident_line(1, now, cause="oom", action="restarted"))
    sink.incident(incident_line(1, now, cause="oom", action="restarted", cost={"lost_steps": 2}))
    assert shown(sink, "incidents_total", kind="oom", severity="critical") == [1.0]
    assert shown(sink, "restarts_total", cause="oom") == [1.0]
    assert sum(shown(sink, "incidents_total")) == 1.0


def test_an_incident_without_an_action_is_counted_after_a_while(sink: PrometheusSink) -> None:
    sink.incident(incident_line(1, 1000.0, cause="not one of our causes"))
    assert shown(sink, "incidents_total", kind="unknown", severity="warning") == [1.0]


def test_counters_add_up_over_restarts_of_the_process(sink: PrometheusSink) -> None:
    for step, retries in enumerate((0, 3, 3, 1), start=1):
        line = step_line(step, 1000.0)
        line["memory"]["retries"] = retries
        sink.step(line)
    assert shown(sink, "allocator_retries_total") == [4.0]


def test_decisions_are_counted_by_outcome_with_their_gains_and_costs(tmp_path: Path) -> None:
    run = new_run(tmp_path / "toy")
    sink, ledger = new_sink(run), DecisionLedger(run)
    assert shown(sink, "decisions_total", outcome="kept") == [0.0]
    tried = Decision(id=1, time=0.0, step=40, finding="", reason="", patch={"plan.compile": True}, undo={},
                     expected={"gain": 0.2}, baseline={"step_seconds": 1.0})  # fmt: skip
    ledger.write(tried)
    sink.step(step_line(41, 1041.0))
    assert shown(sink, "decisions_total", outcome="trying") == [1.0]
    assert shown(sink, "decision_expected_gain_ratio") == [0.2]
    assert shown(sink, "decision_measured_gain_ratio") == []
    measured = {"gain": 0.15, "step_seconds": 0.85, "steps": 20.0, "pause_seconds": 2.5}
    for outcome in ("trying", "kept"):
        ledger.write(replace(tried, outcome=outcome, measured=measured))
    ledger.write(replace(tried, id=2, outcome="advised", expected={"gain": 0.3}))
    sink.step(step_line(80, 1080.0))
    sink.step(step_line(81, 1081.0))
    counts = {outcome: shown(sink, "decisions_total", outcome=outcome) for outcome in ("trying", "kept", "advised")}
    assert counts == {"trying": [1.0], "kept": [1.0], "advised": [1.0]}
    assert shown(sink, "decision_measured_gain_ratio") == [0.15]
    assert shown(sink, "decision_expected_gain_ratio") == [0.2], "what was only advised is not measured"
    assert shown(sink, "trial_seconds") == [2.5]


def test_the_straggler_score_is_the_median_over_the_slowest(sink: PrometheusSink) -> None:
    sink.step(step_line(1, 1000.0, slowest=2.0))
    assert shown(sink, "straggler_score_ratio") == [0.5]
    assert shown(sink, "rank_outlier_ratio", rank="3", what="busy_seconds") == [2.0]


def test_many_ranks_are_summarised_by_min_median_and_max(sink: PrometheusSink) -> None:
    sample = sample_line(1000.0, ranks=MAX_INDIVIDUAL_SERIES)
    sink.sample(sample)
    assert len(shown(sink, "rank_cpu_cores")) == MAX_INDIVIDUAL_SERIES
    sample["ranks"]["77"] = {"cpu": 9.0}
    sink.sample(sample)
    assert shown(sink, "rank_cpu_cores", stat="max") == [9.0]
    assert shown(sink, "rank_cpu_cores", stat="median", rank="") == [1.0]
    assert shown(sink, "rank_cpu_cores", rank="77", stat="") == [9.0]
    assert len(shown(sink, "rank_cpu_cores")) == 6


def test_a_lost_node_is_not_shown(sink: PrometheusSink) -> None:
    sink.sample(sample_line(1000.0, node=0))
    sink.sample(sample_line(1000.0, node=1))
    assert len(shown(sink, "disk_free_bytes")) == 2
    sink.sample(sample_line(2000.0, node=0, gpus=1))
    assert shown(sink, "disk_free_bytes") == [500.0 * GIB]
    assert shown(sink, "gpu_power_watts", node="0", gpu="0", uuid="GPU-0-0") == [600.0]
    assert len(shown(sink, "gpu_power_watts")) == 1


def test_throttled_gpus_are_counted_by_reason(sink: PrometheusSink) -> None:
    hot = [gpu_line(0), gpu_line(1, throttle=["thermal", "power_cap"]), gpu_line(2, throttle=["thermal"])]
    sink.sample(sample_line(1000.0) | {"gpus": hot})
    assert shown(sink, "gpu_throttled", reason="thermal") == [2.0]
    assert shown(sink, "gpu_throttled", reason="none") == [1.0]


def test_the_number_of_series_per_metric_is_limited(sink: PrometheusSink) -> None:
    losses = {f"part {number}": 1.0 for number in range(10_000)}
    sink.step(step_line(1, 1000.0) | {"losses": losses})
    assert len(shown(sink, "part_loss")) == MAX_SERIES_PER_METRIC
    assert shown(sink, "dropped_series_total") == [10_000.0 - MAX_SERIES_PER_METRIC]


def test_a_taken_port_is_logged_once_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sink = PrometheusSink(new_run(tmp_path / "toy"), PrometheusSection(port=port), steps=100, retry_seconds=0.0)
        sink.step(step_line(1, 1000.0))
        assert [record.message for record in caplog.records] == [
            f"cannot serve metrics at 127.0.0.1:{port} yet: Address already in use"
        ]
    sink.step(step_line(2, 1001.0))
    assert 'trimaran_steps_total{run="toy"} 2.0' in page(port)
    sink.close()
    with pytest.raises(OSError, match="refused"):
        page(port)


def test_lines_of_older_versions_are_shown_too(sink: PrometheusSink) -> None:
    sink.step({"step": 1, "loss": 1.0, "step_seconds": 0.5, "time": 1.0})
    sink.event({"kind": "start", "rank": 0, "time": 1.0})
    sink.sample({"time": 1.0})
    assert shown(sink, "loss") == [1.0]
    assert shown(sink, "hfu_ratio") == []


def test_exposed_communication_has_a_series_for_each_axis(sink: PrometheusSink) -> None:
    for step, seconds in ((1, 0.25), (2, 0.5)):
        line = step_line(step, 1000.0 + step) | {"comm_seconds": {"tp": seconds, "cp": None, "world": 0.125, "x": 1.0}}
        sink.step(line)
    assert shown(sink, "axis_wait_seconds_sum", axis="tp") == [0.75]
    assert shown(sink, "axis_wait_seconds_sum", axis="world") == [0.25]
    assert shown(sink, "axis_wait_seconds_sum", axis="cp") == [], "not measured"
    assert shown(sink, "axis_wait_seconds_sum", axis="x") == [], "no axis of a mesh"

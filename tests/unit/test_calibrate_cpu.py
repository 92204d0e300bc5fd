"""Calibration of a CPU: measured once, used by predictions, and no MFU where no peak is known."""

import io
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cpu_rates import RATES
from tests.runs import PREDICTION, finished_run
from trimaran.app import RunState, cluster_of_text, draw, main
from trimaran.core import Plan, Prediction, Recipe
from trimaran.cost import (
    CPU_LENGTH,
    EAGER,
    TILE_DEPTH,
    TIME_PROFILES,
    UPDATE_BYTES,
    BlockSplit,
    Job,
    elementwise_bytes,
    matmul_seconds,
    predict,
    rates_of,
)
from trimaran.machine import (
    DEVICES,
    Cluster,
    CpuRates,
    cpu_rates_path,
    gpu_device,
    parse_cluster,
    read_cpu_rates,
    with_cpu_rates,
    write_cpu_rates,
)
from trimaran.machine.probe import measure_cpu
from trimaran.models import OutlineLayer, outline_for


def prediction(rates: CpuRates | None, plan: Plan | None = None) -> Prediction:
    cluster = parse_cluster("2xcpu")
    recipe = Recipe()
    job = Job(outline=outline_for(recipe.model, recipe.data), seq_len=256)
    plan = plan or Plan.model_validate({"mesh": {"dp_replicate": 2}, "micro_batch": 4})
    return predict(job, with_cpu_rates(cluster, rates) if rates else cluster, plan)


@pytest.mark.slow  # torch is imported once more: 4 seconds, and half a minute on a busy machine
def test_this_cpu_is_measured_once_and_a_prediction_uses_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TRIMARAN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    measured = cluster_of_text("2xcpu", environment).device.cpu_rates
    assert measured is not None
    assert measured.matmul_gflops > 0.1
    assert measured.all_reduce_us > 0
    (file,) = (tmp_path / "calibration").iterdir()
    assert read_cpu_rates(file) == measured
    write_cpu_rates(file, measured._replace(scatter=0.01))  # as on a quiet machine

    again = cluster_of_text("2xcpu", environment, measure=lambda *_: pytest.fail("it measured again"))
    assert again.device.cpu_rates == measured._replace(scatter=0.01)
    assert again.device.achievable_flops("fp32") == pytest.approx(measured.matmul_gflops * 1e9)


def test_rates_of_a_busy_machine_are_measured_again_and_the_better_ones_kept(tmp_path: Path) -> None:
    environment = {"TRIMARAN_CACHE": str(tmp_path)}
    answers = iter([RATES._replace(scatter=0.4), RATES._replace(scatter=0.6), RATES])
    options: dict[str, Any] = {"measure": lambda *_: next(answers), "retry_seconds": -1.0}
    scatters = [cluster_of_text("2xcpu", environment, **options).device.cpu_rates for _ in range(4)]
    assert [each.scatter for each in scatters if each] == [0.4, 0.4, 0.02, 0.02]


def test_a_cpu_that_cannot_be_measured_is_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing")
    with caplog.at_level(logging.WARNING):
        cluster = cluster_of_text("2xcpu", {"TRIMARAN_CACHE": str(tmp_path)})
    assert cluster.device.cpu_rates is None
    assert "not calibrated" in cluster.device.note
    assert "not calibrated" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"layer_us": 1}', json.dumps({**RATES._asdict(), "layer_us": -1})])
def test_an_unusable_file_is_a_warning(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = cpu_rates_path(tmp_path, "cpu", ranks=2, threads=1)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_cpu_rates(path) is None
    assert "ignored" in caplog.text


def test_the_probe_counts_as_the_cost_model_does() -> None:
    outline = outline_for(Recipe().model, Recipe().data)
    ((layer, _),) = outline.main.runs
    assert isinstance(layer, OutlineLayer)
    layer = replace(layer, hidden=measure_cpu.HIDDEN, heads=measure_cpu.HEADS, kv_heads=measure_cpu.KV_HEADS,
                    head_dim=measure_cpu.HEAD_DIM, ffn=measure_cpu.FFN)  # fmt: skip
    rates = rates_of(with_cpu_rates(Cluster(device=DEVICES["cpu"]), RATES).device, "fp32")
    split = BlockSplit(measure_cpu.ROWS, measure_cpu.LENGTH, 1, 1)
    forward = elementwise_bytes(layer, split, rates, TIME_PROFILES["trimaran"], kind=EAGER)
    assert pytest.approx(2.6 * forward) == measure_cpu.COUNTED_BYTES
    assert UPDATE_BYTES[8.0] == measure_cpu.UPDATE_BYTES
    assert (CPU_LENGTH, TILE_DEPTH["cpu"]) == (measure_cpu.LENGTH, measure_cpu.TILE_DEPTH)
    rows, hidden, ffn = measure_cpu.ROWS, measure_cpu.HIDDEN, measure_cpu.FFN
    shapes = ((rows, ffn, hidden), (rows, hidden, ffn), (hidden, ffn, rows))
    work, per_row = measure_cpu.counted_work(rows)
    seconds = sum(matmul_seconds(*shape, rates) for shape in shapes)
    assert seconds * rates.matmul_flops == pytest.approx(2 * (work + RATES.extra_rows * per_row))


def test_rates_follow_from_the_seconds_of_the_calls() -> None:
    work, per_row = measure_cpu.counted_work(measure_cpu.ROWS)
    little, per_row_of_little = measure_cpu.counted_work(measure_cpu.FEW_ROWS)
    took = dict.fromkeys(("attention", "attention_backward", "elementwise", "update", "layer"), [1e-3] * 4)
    took["matmul"] = [2 * (work + 50 * per_row) / 30e9] * 4
    took["few_rows"] = [2 * (little + 50 * per_row_of_little) / 30e9] * 4
    rates = measure_cpu.rates_of_seconds(took, ranks=1)
    assert (rates["matmul_gflops"], rates["extra_rows"]) == (pytest.approx(30.0), pytest.approx(50.0))
    assert rates["scatter"] == 0
    took["layer"] = [1e-3, 1e-3, 2e-3, 2e-3]
    assert measure_cpu.rates_of_seconds(dict.fromkeys(took, took["layer"]), ranks=1)["scatter"] > 0.2


def test_the_error_bar_is_wide_without_calibration_and_grows_with_the_scatter() -> None:
    quiet, busy, uncalibrated = prediction(RATES), prediction(RATES._replace(scatter=0.3)), prediction(None)
    assert 0.2 <= quiet.error < busy.error < uncalibrated.error == 1.0
    assert "not calibrated" in uncalibrated.source
    assert "measured here" in quiet.source
    split = Plan.model_validate({"mesh": {"tp": 2}, "micro_batch": 4})
    assert prediction(RATES, split).error > 2 * quiet.error


def test_a_rate_is_within_its_bar_if_the_time_of_a_step_is() -> None:
    found = PREDICTION.model_copy(update={"error": 0.2, "memory_error": 0.5})
    assert found.error_of("step_seconds") == 0.2
    assert found.error_of("peak_bytes") == 0.5
    assert found.error_of("tokens_per_second", 1.0) == pytest.approx(1 / 0.8 - 1)
    assert found.error_of("tokens_per_second", -1.0) == pytest.approx(1 - 1 / 1.2)
    assert PREDICTION.error_of("peak_bytes") == PREDICTION.error


def test_slower_rates_give_longer_steps() -> None:
    before = prediction(RATES)
    for name in ("matmul_gflops", "attention_gflops", "attention_backward_gflops", "elementwise_gb_per_second",
                 "update_gb_per_second", "all_reduce_gb_per_second"):  # fmt: skip
        slower = RATES._replace(**{name: getattr(RATES, name) / 2})
        assert prediction(slower).step_seconds > before.step_seconds, name
    assert prediction(RATES._replace(layer_us=4000.0)).step_seconds > before.step_seconds + 4 * 2e-3


def test_a_device_without_a_known_peak_has_no_mfu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for found in (prediction(RATES), prediction(None)):
        assert found.mfu == 0
        assert "peak" in found.no_mfu
    assert "catalogue" in gpu_device([("NVIDIA Unheard-of 9000", 80_000.0)]).no_peak
    assert not gpu_device([("NVIDIA H100 80GB HBM3", 81_559.0)]).no_peak
    run = finished_run(tmp_path / "run")
    old = PREDICTION.model_copy(update={"source": "cpu at a steady 0.1 TFLOP/s: a quick estimate"})
    tree = json.loads(run.plan.read_text())  # as an older version wrote it; the steps have an MFU of 20 %
    run.plan.write_text(json.dumps(tree | {"prediction": old.model_dump(mode="json")}))
    state = RunState(run)
    state.refresh()
    answer = state.as_dict()
    assert answer["measured"]["mfu"] is None
    assert "peak" in answer["no_mfu"]
    assert "mfu" not in answer["differences"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(draw(state, width=100))
    assert "mfu" not in console.export_text()
    assert main(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["mfu"] is None


def test_a_plan_for_a_cpu_shows_no_mfu_and_says_why_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", "cluster=2xcpu", "--run-dir", "never"]) == 0
    assert "mfu" not in capsys.readouterr().out
    assert main(["train", "--dry-run", "--set", "cluster=2xcpu", "--run-dir", "never", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["prediction"]
    assert (answer["mfu"], bool(answer["no_mfu"])) == (0, True)

"""`trimaran calibrate --from`: rates fitted to runs that took what the cost model says with other rates."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.measured_runs import PlannedRun, gpu_plan, write_run, write_runs
from trimaran.app import main, refit_rates
from trimaran.core import Plan
from trimaran.machine import FittedRates, LinkFactors, combined, parse_cluster, read_calibration, with_fitted
from trimaran.planner import Observation, Parameter, StepModel, fit_rates, parameters_of

FLEET = (
    PlannedRun(cluster="8xH100", plan=gpu_plan(dp_replicate=8, accumulate=4)),
    PlannedRun(cluster="2x8xH100", plan=gpu_plan(dp_shard=16)),
    PlannedRun(cluster="4x8xH100", plan=gpu_plan(dp_shard=32), seq_len=2048),
    PlannedRun(cluster="4x8xH100", plan=gpu_plan(dp_replicate=4, dp_shard=8), seq_len=2048),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "calibration"


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def observation(planned: PlannedRun, truth: FittedRates) -> Observation:
    """Return the exact step of a run with other rates."""
    question = planned.question
    fields = {"label": "", "job": question.job, "plan": planned.plan, "sigma": 0.02, "phases": {}}
    real = Observation(cluster=with_fitted(question.cluster, truth), seconds=1.0, **fields)
    return Observation(cluster=question.cluster, seconds=StepModel([real]).seconds(0, "", {}), **fields)


def test_fitted_rates_are_written_and_the_planner_uses_them(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "runs", FLEET[:1], FittedRates(matmul={"bf16": 0.8}))
    dry = answer(["calibrate", "--from", "runs", "--dry-run"], capsys)["devices"][0]
    assert not dry["written"]
    assert not cache.exists()
    (found,) = answer(["calibrate", "--from", "runs/run-0", "runs"], capsys)["devices"]
    assert found["written"]
    assert found["changes"] == dry["changes"]
    (change,) = found["changes"]
    assert (change["rate"], len(change["runs"])) == ("bf16 matmuls", 1)
    assert change["after"] / change["before"] == pytest.approx(0.8, rel=0.02)
    calibration = read_calibration(cache / "h100.json")
    assert calibration.fitted is not None
    assert [each.version for each in calibration.fitted.runs] == ["0.1.0"]
    assert "fitted to 1 run on " in parse_cluster("2x8xH100", calibrations=cache).device.note
    prediction = answer(["plan", "llama-3.2-1b", "--cluster", "8xH100"], capsys)["prediction"]
    assert "fitted to 1 run" in prediction["source"]
    # What is fitted already is not fitted again, and the file stays.
    text = (cache / "h100.json").read_bytes()
    assert answer(["calibrate", "--from", "runs"], capsys, code=2)["error"]["code"] == "P086"
    assert (cache / "h100.json").read_bytes() == text


@pytest.mark.slow
def test_the_rates_of_a_fleet_are_found(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = FittedRates(matmul={"bf16": 0.8}, links={"InfiniBand": LinkFactors(bandwidth=0.5)})
    write_runs(tmp_path / "fleet", FLEET, truth)
    before = parse_cluster("2x8xH100", calibrations=cache)
    (found,) = answer(["calibrate", "--from", "fleet"], capsys)["devices"]
    rates = {each["rate"]: each["after"] / each["before"] for each in found["changes"]}
    assert rates == {"bf16 matmuls": pytest.approx(0.8, rel=0.02), "InfiniBand bandwidth": pytest.approx(0.5, rel=0.02)}
    assert {"NVLink bandwidth", "NVLink latency", "memory", "host"} <= set(found["unchanged"])
    errors = found["median_error"]
    assert errors["before"] > 0.1
    assert errors["after"] < 0.02
    assert errors["left_out"] < 0.03
    matmuls, network = sorted(found["changes"], key=lambda each: each["kind"] != "matmul")
    assert len(matmuls["runs"]) == 4
    assert len(network["runs"]) == 3  # the run on one node says nothing about it
    after = parse_cluster("2x8xH100", calibrations=cache)
    assert after.levels[1].bandwidth / before.levels[1].bandwidth == pytest.approx(0.5, rel=0.02)


def test_the_trials_of_an_interrupted_tuning_change_no_rates(tmp_path: Path, cache: Path) -> None:
    write_runs(tmp_path / "trials", FLEET, FittedRates(matmul={"bf16": 0.8}))
    runs = sorted((tmp_path / "trials").iterdir())
    interrupted = refit_rates(runs, "interrupted")
    assert (interrupted.answer, "interrupted" in interrupted.trouble, cache.exists()) == (None, True, False)
    assert refit_rates(runs, "time").answer is not None
    assert (cache / "h100.json").exists()


def test_one_run_changes_only_what_it_determines() -> None:
    truth = FittedRates(matmul={"bf16": 0.7}, links={"InfiniBand": LinkFactors(latency=3.0)})
    result = fit_rates([observation(FLEET[0], truth)])
    assert list(result.fit.values) == [Parameter("matmul", "bf16")]
    assert math.exp(result.fit.values[Parameter("matmul", "bf16")]) == pytest.approx(0.7, rel=0.02)
    assert result.left_out == ()
    assert result.is_better


def test_a_slow_host_is_found_where_steps_are_small() -> None:
    truth = FittedRates(host=2.0)
    small = [PlannedRun(cluster="1xH200", plan=Plan(precision="bf16", cuda_graphs=False, micro_batch=size),
                        model="qwen2.5-0.5b", seq_len=256) for size in (1, 2)]  # fmt: skip
    large = PlannedRun(cluster="1xH200", plan=Plan(precision="bf16", micro_batch=4))
    result = fit_rates([observation(each, truth) for each in (*small, large)])
    assert list(result.fit.values) == [Parameter("host")]
    assert math.exp(result.fit.values[Parameter("host")]) == pytest.approx(2.0, rel=0.02)


def test_a_run_that_shared_its_machine_does_not_spoil_the_others() -> None:
    truth = FittedRates(matmul={"bf16": 0.8})
    sizes = (1, 2, 4, 8, 16)
    runs = [PlannedRun(cluster="8xH100", plan=gpu_plan(dp_replicate=8, accumulate=size)) for size in sizes]
    found = [observation(each, truth) for each in runs]
    slow = PlannedRun(cluster="8xH100", plan=gpu_plan(dp_replicate=8, accumulate=12))
    bad = observation(slow, FittedRates(matmul={"bf16": 0.3}))
    result = fit_rates([*found, bad])
    assert math.exp(result.fit.values[Parameter("matmul", "bf16")]) == pytest.approx(0.8, rel=0.05)


def test_steps_as_predicted_change_nothing(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    write_run(tmp_path / "runs" / "as-predicted", FLEET[0])
    error = answer(["calibrate", "--from", "as-predicted"], capsys, code=2)["error"]
    assert error["code"] == "P086"
    assert not cache.exists()


def test_runs_that_cannot_be_used_are_listed_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    truth = FittedRates(matmul={"bf16": 0.7})
    runs = tmp_path / "runs"
    write_run(runs / "good", FLEET[0], truth)
    for name in ("damaged-plan", "damaged-recipe", "no-events", "damaged-lines", "other-model"):
        shutil.copytree(runs / "good", runs / name)
    (runs / "damaged-plan" / "plan.json").write_text("{")
    (runs / "damaged-recipe" / "recipe.yaml").write_text("- 1")
    (runs / "no-events" / "events" / "rank-0.jsonl").unlink()
    (runs / "damaged-lines" / "metrics.jsonl").write_bytes(b"\xff\x00 not a step\n" * 40)
    recipe = (runs / "other-model" / "recipe.yaml").read_text()
    elsewhere = recipe.replace("preset: llama-3.2-1b", "preset: null").replace("  path: null", "  path: /not/here", 1)
    (runs / "other-model" / "recipe.yaml").write_text(elsewhere)
    write_run(runs / "short", PlannedRun(cluster="8xH100", plan=FLEET[0].plan, steps=4), truth)
    (runs / "not-a-run").mkdir()
    found = answer(["calibrate", "--from", "runs", "--dry-run"], capsys)
    reasons = {Path(each["run"]).name: each["reason"] for each in found["skipped"]}
    assert set(reasons) == {"damaged-plan", "damaged-recipe", "no-events", "damaged-lines", "other-model", "short"}
    assert "plan.json" in reasons["damaged-plan"]
    assert "5 are needed" in reasons["short"]
    assert [Path(each["run"]).name for each in found["devices"][0]["runs"]] == ["good"]
    assert answer(["calibrate", "--from", "runs/short"], capsys, code=2)["error"]["code"] == "P085"
    assert answer(["calibrate", "--from", "nowhere"], capsys, code=2)["error"]["code"] == "P085"
    assert answer(["calibrate"], capsys, code=2)["error"]["code"] == "P085"


def test_one_output_file_is_for_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = FittedRates(matmul={"bf16": 0.7})
    write_run(tmp_path / "runs" / "h100", FLEET[0], truth)
    write_run(tmp_path / "runs" / "a100", PlannedRun(cluster="8xA100-80GB", plan=FLEET[0].plan), truth)
    error = answer(["calibrate", "--from", "runs", "--output", "fleet.json"], capsys, code=2)["error"]
    assert error["code"] == "P087"
    assert not (tmp_path / "fleet.json").exists()
    assert main(["calibrate", "--from", "runs/h100", "--output", "fleet.json"]) == 0
    assert f"calibration: {tmp_path / 'fleet.json'}" in capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text("{device: H100, num_nodes: 2, calibration: fleet.json}")
    ours, plain = parse_cluster("ours.yaml"), parse_cluster("2x8xH100")
    assert ours.device.factor("bf16") == pytest.approx(0.7, rel=0.05)
    assert plain.device.factor("bf16") == 1.0


def test_a_cpu_of_another_machine_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(micro_batch=8)
    run = write_run(tmp_path / "runs" / "cpu", PlannedRun(cluster="1xcpu", plan=plan, model="tiny", seq_len=64))
    text = run.events(0).read_text()
    start = json.loads(text.splitlines()[0])
    run.events(0).write_text(text.replace(start["data"]["host"], "another-machine"))
    error = answer(["calibrate", "--from", "cpu"], capsys, code=2)["error"]
    assert error["code"] == "P085"
    assert "another-machine" in error["what"]


def test_factors_after_each_other_multiply_and_stay_within_bounds() -> None:
    first = FittedRates(matmul={"bf16": 0.5}, memory=2.0, links={"NVLink": LinkFactors(bandwidth=0.5)})
    second = FittedRates(matmul={"bf16": 0.5, "fp8": 2.0}, host=3.0, links={"NVLink": LinkFactors(latency=4.0)})
    both = combined(first, second)
    assert both.matmul == {"bf16": 0.25, "fp8": 2.0}
    assert (both.memory, both.host) == (2.0, 3.0)
    assert both.links == {"NVLink": LinkFactors(bandwidth=0.5, latency=4.0)}
    cluster = parse_cluster("8xH100")
    once, twice = with_fitted(cluster, both), with_fitted(with_fitted(cluster, first), second)
    assert once.levels == twice.levels
    assert dict(once.device.fitted) == dict(twice.device.fitted)
    assert once.device.memory_bandwidth == twice.device.memory_bandwidth


def test_a_rank_on_one_node_has_no_network_to_fit() -> None:
    kinds = {str(each) for each in parameters_of([observation(FLEET[0], FittedRates())])}
    assert kinds == {"bf16 matmuls", "NVLink bandwidth", "NVLink latency", "memory", "host"}

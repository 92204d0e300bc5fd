"""Real runs on the CPU: listed by `history`, shown by `plan`, and fitted by `calibrate --from`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.environment import environment
from trimaran.app import main

SIZES = {"data.seq_len": "64", "train.global_batch": "8", "train.save": "false"}
SHAPE = "model.shape={layers: 2, hidden: 64, heads: 4, ffn: 128}"


def trimaran(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the answer of a command in a process of its own, with a state of its own."""
    own = environment(XDG_STATE_HOME=str(folder / "state"))
    done = forked.run("trimaran", *arguments, "--json", cwd=folder, env=own, timeout=300)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def settings(cluster: str, **own: str) -> list[str]:
    fields = {"cluster": cluster, **SIZES, **{name.replace("__", "."): value for name, value in own.items()}}
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


def test_a_real_run_is_measured_listed_and_shown_beside_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMARAN_CACHE", environment()["TRIMARAN_CACHE"])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def answer(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    asked = ["--set", SHAPE, *settings("1xcpu")]
    trained = trimaran(tmp_path, "train", "--warm", *asked, "--set", "train.steps=12", "--no-check",
                       "--run-dir", "runs/a")  # fmt: skip
    assert trained["status"] == "done"
    (group,) = answer("history")["groups"]
    (plan,) = group["plans"]
    assert group["cluster"] == "1xcpu"
    assert plan["run"]["num_steps"] >= 5
    assert plan["measured"]["step_seconds"] > 0
    assert plan["predicted"]["step_seconds"] == pytest.approx(trained["prediction"]["step_seconds"])
    measured = answer("plan", *asked)["measured"]
    assert measured["run"]["path"] == str(tmp_path / "runs" / "a")
    assert measured["plan"] == trained["plan"]


@pytest.mark.slow  # four runs
def test_rates_fitted_to_real_runs_predict_them_better_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    for name, cluster, hidden in (("a", "1xcpu", 64), ("b", "1xcpu", 256), ("c", "2xcpu", 128), ("d", "2xcpu", 256)):
        shape = f"model.shape={{layers: 4, hidden: {hidden}, heads: 4, ffn: {2 * hidden}}}"
        trimaran(tmp_path, "train", "--warm", "--set", shape, *settings(cluster, train__steps="20"), "--no-check",
                 "--run-dir", f"runs/{name}")  # fmt: skip
    (path,) = (tmp_path / "cache" / "calibration").glob("*cores-1x*")
    rates = json.loads(path.read_text())
    rates["matmul_gflops"] *= 4  # as if single operators had been measured far too fast
    rates["attention_gflops"] *= 4
    rates["attention_backward_gflops"] *= 4
    path.write_text(json.dumps(rates))
    (fit,) = trimaran(tmp_path, "calibrate", "--from", "runs")["devices"]
    assert fit["written"]
    assert len(fit["runs"]) == 4
    assert fit["median_error"]["after"] < fit["median_error"]["before"]
    assert fit["changes"]
    source = trimaran(tmp_path, "plan", "--set", SHAPE, *settings("1xcpu"))["prediction"]["source"]
    assert "fitted to 4 runs" in source

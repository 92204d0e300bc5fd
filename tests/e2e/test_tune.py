"""`trimaran tune` with real trials on the CPU: supervisor, ranks and data."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.environment import environment
from trimaran.app import main, resolve
from trimaran.core import Plan
from trimaran.planner import keeps_pins

SIZES = {
    "model.shape": "{layers: 2, hidden: 64, heads: 4, ffn: 128}",
    "data.seq_len": "64",
    "train.global_batch": "16",
    "data.workers": "0",
    "cluster": "2xcpu",
}
# Everything but the micro-batch: few candidates, and none that compiles.
PINS: dict[str, Any] = {
    "mesh": {"dp_replicate": 2, "dp_shard": 1},
    "sharding": "none",
    "recompute": "none",
    "loss": "fused",
    "compile": False,
    "comm": {"overlap": True, "bucket_mb": 25},
}

ALL = ("--minutes=20", "--min-gain=0")  # on a busy machine the noise would end a tuning after the first trial


def settings(plan: dict[str, Any] | str) -> list[str]:
    fields = SIZES | {"plan": json.dumps(plan)}
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tune(capsys: pytest.CaptureFixture[str], plan: dict[str, Any] | str, *options: str) -> dict[str, Any]:
    assert main(["tune", *settings(plan), *ALL, "--no-check", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def command(*options: str, plan: dict[str, Any] | str, **variables: str) -> forked.Forked:
    words = ("tune", *settings(plan), *ALL, "--no-check", *options)
    return forked.start("trimaran", *words, env=environment(**variables))


def trials(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("**/trials.jsonl") for line in path.read_text().splitlines()]


def test_plans_are_measured_pins_stay_and_the_best_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tune(capsys, PINS, "--set=train.global_batch=8", "--out=tuned.yaml")
    assert answer["stopped"] == "nothing left"
    tried = answer["tried"]
    assert len(tried) >= 2
    assert tried[0]["plan"] == answer["first"]["plan"]
    for each in tried:
        plan = Plan.model_validate(each["plan"])
        assert plan.global_batch == 8
        assert keeps_pins(plan, Plan.model_validate(PINS))
        assert each["outcome"] in ("measured", "slower")
        assert each["measured"]["step_seconds"] > 0
        assert each["measured"]["peak_bytes"] > 0
        assert each["predicted"]["step_seconds"] > 0
    assert len({each["plan"]["micro_batch"] for each in tried}) == len(tried)
    fastest = min(each["measured"]["step_seconds"] for each in tried if each["outcome"] == "measured")
    assert answer["best"]["measured"]["step_seconds"] == fastest
    assert answer["gain"] == pytest.approx(1 - fastest / answer["first"]["measured"]["step_seconds"])
    assert answer["next"].endswith("train tuned.yaml")
    request = resolve("tuned.yaml", [])
    assert request.plan.model_dump(mode="json") == answer["best"]["plan"]
    # The trials are runs, which calibration and history know.
    assert not list(Path(answer["folder"]).glob("trial-*/checkpoints/*"))
    assert answer["calibration"]["devices"] or answer["calibration"]["trouble"]
    assert main(["history", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert listed["groups"][0]["plans"]


@pytest.mark.slow  # torch is imported twice, and about five trials are made
def test_ctrl_c_keeps_results_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = command(plan=PINS)
    deadline = time.monotonic() + 300
    while not trials(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "interrupted; the same command continues" in out
    (first, *_) = kept = trials(tmp_path)
    recipe = next(tmp_path.glob("runs/tune/*/recipe.yaml"))
    assert resolve(str(recipe), []).plan.model_dump(mode="json") == first["plan"]
    answer = tune(capsys, PINS)
    new = trials(tmp_path)[len(kept) :]
    assert len(new) == answer["new_trials"] >= 1
    compared = {each["key"] for each in answer["tried"] if each["measured"] and each["measured"]["trials"] > 1}
    done = {each["key"] for each in kept if each["outcome"] == "measured"}
    assert {each["key"] for each in new} & done <= compared
    again = tune(capsys, PINS)
    assert again["new_trials"] == 0
    assert again["best"]["key"] == answer["best"]["key"]


@pytest.mark.slow  # compiles, in vain, and makes a few trials
def test_a_plan_that_fails_is_a_result_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = {**PINS, "micro_batch": 8}
    del pins["compile"]
    process = command("--json", plan=pins, CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    answer = json.loads(out.splitlines()[-1])
    by_compile = {each["plan"]["compile"]: each for each in answer["tried"]}
    assert by_compile[False]["outcome"] == "measured"
    assert by_compile[True]["outcome"] in ("failed", "refused")
    assert by_compile[True]["reason"]
    assert answer["best"]["plan"]["compile"] is False


@pytest.mark.slow  # about ten trials
def test_without_pins_a_better_plan_is_found_than_a_bad_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"mesh": {"dp_replicate": 2}, "micro_batch": 1, "recompute": "full", "compile": False}
    pinned = tune(capsys, bad)
    assert {each["plan"]["micro_batch"] for each in pinned["tried"]} == {1}
    assert {each["plan"]["recompute"] for each in pinned["tried"]} == {"full"}
    free = tune(capsys, {"compile": False, "mesh": {"dp_replicate": 2}, "sharding": "none"})
    assert free["best"]["measured"]["step_seconds"] < 0.8 * pinned["best"]["measured"]["step_seconds"]


def test_a_cluster_that_is_not_this_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--set", "cluster=2x8xcpu"]) == 2
    assert "A007" in capsys.readouterr().err

"""`trimaran plan` and `trimaran predict` from the command line."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cases import slow
from tests.e2e.test_cli_start import complete
from trimaran.app import main
from trimaran.core import Plan, Prediction
from trimaran.models import PRESETS, spec_to_hf

EIGHT = ["--cluster", "8xH100"]
LINE = {
    "id": "a",
    "model": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq_len": 4096},
    "cluster": {"gpu": "H100", "gpus": 8},
    "plan": {"sharding": "parameters", "micro_batch": 1, "global_batch": 64},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    return json.loads(output([*arguments, "--json"], capsys, code=code))


def mistake(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_a_preset_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["plan", "llama-3-8b", *EIGHT, "--seq-len", "2048", "--global-batch", "64"], capsys)
    assert (found["model"]["name"], found["model"]["parameters"]) == ("llama-3-8b", 8_030_261_248)
    assert (found["name"], found["seq_len"], found["global_batch"], found["fits"]) == ("llama-3-8b", 2048, 64, True)
    plan = Plan.model_validate(found["plan"])
    assert plan.mesh.world_size == 8
    assert plan.global_batch == 64
    assert Prediction.model_validate(found["prediction"]).fits
    assert found["ranked"][0] == {"plan": found["plan"], "prediction": found["prediction"]}
    assert found["num_considered"] >= len(found["ranked"]) >= 1


def test_a_bare_model_gets_a_default_length_and_a_batch_that_splits(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["plan", "llama-2-7b", "--cluster", "3x8xH100"], capsys)
    assert found["seq_len"] == 4096
    assert found["global_batch"] % 24 == 0
    assert answer(["plan", "tiny", "--cluster", "2xcpu"], capsys)["seq_len"] == 2048


@pytest.mark.parametrize("named", ["folder", slow("folder/config.json")])
def test_a_model_on_disk_is_planned_like_its_preset(
    named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text(json.dumps(spec_to_hf(PRESETS["llama-3-8b"])))
    found, preset = (answer(["plan", what, *EIGHT], capsys) for what in (named, "llama-3-8b"))
    assert found["model"]["parameters"] == preset["model"]["parameters"]
    assert found["plan"] == preset["plan"]


def test_the_printed_answer_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(["plan", "llama-3-8b", *EIGHT, "--tokens", "1T", "--price", "2.5"], capsys)
    for word in ("8.0B parameters", "8xH100", "1.0M tokens", "a device", "fits", "tokens/s", "mfu",
                 "±", "days", "GPU hours", "peak memory of one device", "time of one step"):  # fmt: skip
        assert word in shown, word
    assert "\x1b" not in shown
    assert shown.splitlines()[-1].startswith("next  trimaran train --set model.preset=llama-3-8b --set cluster=8xH100")


def test_the_next_command_runs_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for goal in ("throughput", "memory"):
        arguments = ["plan", "tiny", "--cluster", "2xcpu", "--goal", goal]
        found = answer(arguments, capsys)
        again = shlex.split(found["next"])
        dry = json.loads(output([*again[again.index("train") :], "--dry-run", "--json"], capsys))
        assert dry["plan"] == found["plan"]


def test_days_and_cost_follow_from_tokens_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["plan", "llama-3-8b", *EIGHT, "--tokens", "1T", "--price", "2.5"], capsys)
    seconds = 1e12 / found["prediction"]["tokens_per_second"]
    assert found["bill"]["days"] == pytest.approx(seconds / 86400)
    assert found["bill"]["cost"] == pytest.approx(seconds / 3600 * 8 * 2.5)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["lama-3-8b"], "A012"),
        (["gone.yaml"], "A003"),
        (["llama-3-8b", *EIGHT, "--goal", "speed"], "A013"),
        (["llama-3-8b", *EIGHT, "--tokens", "many"], "A013"),
        (["llama-3-8b", *EIGHT, "--tokens", "1T", "--price", "-1"], "A013"),
        (["llama-3-8b", *EIGHT, "--price", "1"], "A013"),
        (["llama-3-8b", *EIGHT, "--mtbf", "0"], "A013"),
        (["llama-3-8b", *EIGHT, "--emit", "keras"], "P060"),
        (["llama-3-8b", *EIGHT, "--output", "conf"], "A013"),
        (["llama-3-8b", *EIGHT, "--seq-len", "-5"], "R013"),
        (["llama-3-8b", "--cluster", "8xH1000"], "C001"),
    ],
)
def test_an_invalid_request_is_an_error(arguments: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(["plan", *arguments], capsys).startswith(code)


@pytest.mark.slow  # tests/e2e/test_doctor.py has it for one device, tests/unit/test_planner_search.py with its fix
def test_if_nothing_fits_the_error_is_p007(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.1-405b", "--cluster", "2xA100-40GB"]
    assert mistake(arguments, capsys).startswith("P007: no plan fits")
    found = answer(arguments, capsys, code=2)
    assert found["error"]["code"] == "P007"


def test_emitted_files_are_not_overwritten_without_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3-8b", *EIGHT, "--emit", "accelerate", "--output", "conf"]
    found = answer(arguments, capsys)
    assert found["emission"]["files"] == ["conf/accelerate.yaml"]
    assert "accelerate launch" in found["next"]
    before = (folder / "conf" / "accelerate.yaml").read_text()
    (folder / "conf" / "accelerate.yaml").write_text("mine")
    assert mistake(arguments, capsys).startswith("A014")
    assert (folder / "conf" / "accelerate.yaml").read_text() == "mine"
    assert "written for accelerate" in output([*arguments, "--force"], capsys)
    assert (folder / "conf" / "accelerate.yaml").read_text() == before


def test_an_unwritable_output_folder_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").touch()
    arguments = ["plan", "llama-3-8b", *EIGHT, "--emit", "deepspeed", "--output", "file/conf"]
    assert mistake(arguments, capsys).startswith("A015")


def test_models_complete_in_the_shell() -> None:
    assert complete("trimaran plan llama-3.2") == ["llama-3.2-1b", "llama-3.2-3b"]


def predicted(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimaran", "predict", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)


def test_predict_answers_every_line_in_order_and_counts_the_bad_ones(folder: Path) -> None:
    huge = '{"id": "' + "x" * 10_000_000 + '"}'
    lines = [json.dumps(LINE), "{", "", json.dumps(LINE | {"id": "b", "cluster": {"gpu": "H1000", "gpus": 8}}), huge]
    (folder / "plans.jsonl").write_text("\n".join([*lines, json.dumps(LINE | {"id": "z"})]))
    for done in (
        forked.run("trimaran", "predict", "plans.jsonl", "--json"),
        predicted((folder / "plans.jsonl").read_text(), "-", "--json"),
    ):
        assert done.returncode == 0
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert [each["id"] for each in answers] == ["a", None, None, "b", None, "z"]
        assert [each.get("error", {}).get("code") for each in answers] == [None, "P051", "P051", "C001", "P051", None]
        assert done.stderr.startswith("4 of 6 lines have an error")


def test_predict_answers_a_pipe_line_by_line() -> None:
    command = [sys.executable, "-m", "trimaran", "predict", "-", "--json"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    for name in ("first", "second"):
        process.stdin.write(json.dumps(LINE | {"id": name}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == name
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_predict_prints_a_table(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "few.jsonl").write_text(json.dumps(LINE) + "\n{\n")
    shown = output(["predict", "few.jsonl"], capsys)
    assert "1 fit" in shown
    assert "1 lines have errors" in shown
    many = [json.dumps(LINE | {"id": f"plan-{size}", "plan": LINE["plan"] | {"global_batch": 8 * size}})  # type: ignore[operator]
            for size in range(1, 101)]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(many).encode())))
    assert "these are the 20 fastest" in output(["predict", "-"], capsys)
    assert mistake(["predict", "feww.jsonl"], capsys).startswith("A011")


def test_predict_prints_a_sample_that_it_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "trimaran predict --example > plans.jsonl" in mistake(["predict"], capsys)
    (folder / "plans.jsonl").write_text(output(["predict", "--example"], capsys))
    assert "6 lines" in output(["predict", "plans.jsonl"], capsys)


def test_plan_takes_an_adapter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(["plan", "llama-3.1-8b", "--cluster", "1xH100", "--adapter", "lora:16"], capsys)
    assert "LoRA of rank 16" in shown
    assert "model.adapter={kind: lora, rank: 16}" in shown
    assert mistake(["plan", "tiny", "--adapter", "loar"], capsys).startswith("A013")


def test_predict_is_fast(folder: Path) -> None:
    many = [LINE | {"id": size, "plan": {"mesh": {"tp": 2 ** (size % 4)}, "micro_batch": 1 + size % 7}}
            for size in range(4000)]  # fmt: skip
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, many)))
    before = os.times().children_user
    assert len(predicted("", "many.jsonl", "--json").stdout.splitlines()) == 4000
    assert os.times().children_user - before < 4.0  # 1,000 a second and start-up, on the slowest machine

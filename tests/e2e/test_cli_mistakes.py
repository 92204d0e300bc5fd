"""Every mistake is one clear error with exit code 2, no traceback, and nothing half-written."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.disks import mounted
from tests.environment import environment
from tests.runs import new_run
from trimaran.app import main
from trimaran.models import PRESETS, spec_to_hf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with the cache beside it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    return folder


def mistake(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the error of a command, after checking its format."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    what, where, fix = shown.err.splitlines()
    assert where.startswith("  where: ")
    assert fix.startswith("  fix:   ")
    code, _, what = what.partition(": ")
    return {"code": code, "what": what, "where": where[9:], "fix": fix[9:]}


@pytest.mark.parametrize(
    ("recipe", "code", "where"),
    [
        ("name: x\ntrain: {stepz: 3}", "R011", "train.stepz (bad.yaml, line 2)"),
        ("train: {steps: many}", "R012", "train.steps (bad.yaml, line 1)"),
        ("train: {lr: -1.0}", "R013", "train.lr (bad.yaml, line 1)"),
        ("data:\n  seq_len: 0", "R013", "data.seq_len (bad.yaml, line 2)"),
        ("train: {steps: 1", "R001", "bad.yaml, line 1"),
        ("- a\n- b", "R001", "bad.yaml"),
        ("name: ../../etc", "R013", "name (bad.yaml, line 1)"),
        ("plan: {mesh: {tp: 3}}\ncluster: 2xcpu", "P", "plan.mesh"),
        ("plan: {mesh: {dp_replicate: 4, dp_shard: 2}}\ncluster: 2xcpu", "P001", "plan.mesh"),
        ("model: {preset: tiyn}", "M001", "model.preset"),
        ("cluster: 8xH1000", "C", "cluster"),
        ("cluster: 8xH100", "A007", "cluster"),
        ("data: {source: text, path: gone.txt}", "T003", "data.path: gone.txt"),
        ("data: {source: text}", "T", "data.path"),
    ],
)
def test_a_recipe_with_a_mistake_starts_nothing(
    recipe: str, code: str, where: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.yaml").write_text(recipe)
    error = mistake(["train", "bad.yaml"], capsys)
    assert error["code"].startswith(code)
    assert where in error["where"]
    assert [each.name for each in folder.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize("command", ["train", "resume", "generate", "export", "bench calibrate"])
def test_an_unusable_compile_cache_starts_nothing(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = new_run(folder / "mine", world_size=1)
    done.model.mkdir()
    before = {path: path.stat().st_mtime_ns for path in done.path.rglob("*")}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/mine")
    arguments = [*command.split(), *(["mine"] if command in ("resume", "generate", "export") else [])]
    error = mistake(arguments, capsys)
    assert (error["code"], error["where"]) == ("A017", "the environment variable TORCHINDUCTOR_CACHE_DIR")
    assert {path: path.stat().st_mtime_ns for path in done.path.rglob("*")} == before
    assert [each.name for each in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("torchrun_environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["node", "torchrun"])
def test_a_node_reports_an_unusable_compile_cache_itself(torchrun_environment: dict[str, str], folder: Path) -> None:
    run = new_run(folder / "mine", world_size=1)
    command = (
        ["trimaran", "train", "--run-dir", "other"] if torchrun_environment else ["trimaran.launch", str(run.path)]
    )
    done = forked.run(*command, env=environment(TORCHINDUCTOR_CACHE_DIR="/proc/mine", **torchrun_environment))
    assert done.returncode == 2
    assert done.stderr.startswith("A017: TORCHINDUCTOR_CACHE_DIR is '/proc/mine'")
    assert not run.attempts.exists()


@pytest.mark.parametrize(("name", "content"), [("empty.txt", b""), ("binary.txt", bytes(range(256)) * 64)])
def test_data_that_is_not_text_starts_nothing(
    name: str, content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(content)
    error = mistake(["train", "--set", "data.source=text", "--set", f"data.path={name}"], capsys)
    assert error["code"].startswith("T")
    assert [each.name for each in folder.iterdir()] == [name]


@pytest.mark.parametrize(
    "setting", ["train.steps", "=3", "train..steps=3", "train.steps=[", "name.x=3", "train.stepz=3"]
)
def test_an_invalid_setting_starts_nothing(setting: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(["train", "--set", setting], capsys)["code"].startswith("R")
    assert not any(folder.iterdir())


def test_for_a_missing_recipe_the_closest_name_is_suggested(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "stdlib-tiny.yaml").touch()
    error = mistake(["train", "stdlib-tny.yaml"], capsys)
    assert error["code"] == "A003"
    assert "did you mean 'stdlib-tiny.yaml'?" in error["what"]


@pytest.mark.parametrize(
    ("name", "code"), [("huge.yaml", "A004"), ("binary.yaml", "A005"), ("folder.yaml", "A003"), ("/dev/zero", "A003")]
)
def test_a_file_that_is_not_a_recipe_is_refused(
    name: str, code: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "huge.yaml").write_bytes("é".encode() * (1 << 20))
    (folder / "binary.yaml").write_bytes(b"\x80\x02\xff")
    (folder / "folder.yaml").mkdir()
    assert mistake(["plan", name], capsys)["code"] == code


def test_a_recipe_can_come_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"name: piped\ncluster: 2xcpu")))
    assert main(["plan", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "piped"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"nam: piped")))
    assert "standard input, line 1" in mistake(["plan", "-"], capsys)["where"]


def test_an_occupied_run_directory_is_not_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_run(folder / "run")
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.tex").write_text("all my work")
    (folder / "file").write_text("a file")
    (folder / "link").symlink_to(folder / "nowhere")
    before = sorted(folder.rglob("*"))
    codes = {name: mistake(["train", "--run-dir", name], capsys)["code"] for name in ("run", "mine", "file", "link")}
    assert codes == {"run": "D004", "mine": "D002", "file": "D002", "link": "D002"}
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["/proc/run", "file/run"])
def test_an_unwritable_run_directory_is_an_error(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").touch()
    assert mistake(["train", "--run-dir", path], capsys)["code"] == "D003"
    assert [each.name for each in folder.iterdir()] == ["file"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page."""
    with mounted(tmp_path / "disk", "size=4k") as disk:
        yield disk


def test_a_full_disk_leaves_no_partial_run(full_disk: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(full_disk / "a" / "run")
    assert mistake(["train", "--run-dir", run], capsys)["code"] == "D005"
    assert not any(full_disk.iterdir())


def test_a_full_cache_is_an_error(full_disk: Path, folder: Path, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("TRIMARAN_CACHE", str(full_disk / "cache"))
    assert mistake(["train"], capsys)["code"].startswith("T")
    assert not any(folder.iterdir())


def test_tokens_that_the_model_does_not_know_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = mistake(["train", "--set", "model.shape.vocab=200"], capsys)
    assert error["code"] == "T020"
    assert "257" in error["fix"]
    assert not any(folder.iterdir())


def test_a_torchrun_of_another_size_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert mistake(["train", "--set", "cluster=4xcpu"], capsys)["code"] == "A010"


def test_a_dry_run_writes_nothing_and_prints_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--json", "--set", "cluster=2xcpu"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"][-2:] == ["trimaran.launch", str(Path("runs/stdlib-tiny").absolute())]
    assert answer["plan"]["mesh"]["dp_replicate"] * answer["plan"]["mesh"]["dp_shard"] == 2
    assert main(["train", "--dry-run", "--set", "cluster=2xcpu"]) == 0
    assert "python -m trimaran.launch" in capsys.readouterr().out
    assert not any(folder.iterdir())


def test_a_plan_is_printed_as_text_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "model.preset=llama-3-8b", "--set", "cluster=8xH100"]
    assert main(["plan", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "8xH100" in shown
    assert "next  trimaran train --set model.preset=llama-3-8b --set cluster=8xH100\n" in shown
    assert main(["plan", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prediction"]["memory"].keys() == {name for name in answer["prediction"]["memory"] if name in shown}


def test_a_run_on_several_nodes_is_prepared_and_its_command_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--set", "cluster=2x1xcpu", "--run-dir", "run", "--json"]
    assert main(arguments) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert command[-4:] == ["trimaran.launch", str(Path("run").absolute()), "--nodes=2", "--address=auto"]
    assert Path("run/plan.json").is_file()
    assert mistake(arguments[:-1], capsys)["code"] == "D004"


def test_a_plan_for_several_nodes_is_started_with_torchrun(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--set", "cluster=2x4xA100-80GB"]) == 0
    assert "next  torchrun --nnodes=2 --nproc-per-node=4 " in capsys.readouterr().out


def test_shards_are_packed_once_and_can_be_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text.txt").write_text("one two three\n" * 50)
    pack = ["data", "pack", "--source", "text", "--path", "text.txt", "--out", "shards"]
    assert main([*pack, "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["num_tokens"] == 14 * 50 + 1
    assert main(["data", "info", "shards", "--verify"]) == 0
    assert f"data: {{source: shards, path: {folder / 'shards'}}}" in capsys.readouterr().out
    assert mistake(pack, capsys)["code"] == "T016"
    assert mistake(["data", "info", "text.txt"], capsys)["code"] == "T014"
    tokens = folder / "shards" / packed["shards"][0]["file"]
    tokens.write_bytes(bytes(os.urandom(tokens.stat().st_size)))
    assert mistake(["data", "info", "shards", "--verify"], capsys)["code"] == "T015"


def test_a_shape_that_cannot_be_saved_is_refused_before_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = ["--set", "model.shape={qkv_bias: true, qk_norm: true}"]
    assert mistake(["train", *odd], capsys)["code"] == "M010"
    assert not any(folder.iterdir())


def test_weights_that_are_pickles_are_refused_before_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(spec_to_hf(PRESETS["tiny"])))
    (model / "pytorch_model.bin").touch()
    assert mistake(["train", "--set", f"model.path={model}"], capsys)["code"] == "M020"
    assert [each.name for each in folder.iterdir()] == ["model"]

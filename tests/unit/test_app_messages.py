"""Messages: what a person meant by a wrong field, option or command, and where the mistake is."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.app import COMMAND_ALIASES, COMMANDS, learning_rate_change, main
from trimaran.core import FIELD_ALIASES, Schedule, TrainSection, UserError, all_fields, field_for, parse_recipe


def mistakes_of(text: str, *settings: str) -> tuple[UserError, ...]:
    with pytest.raises(UserError) as caught:
        parse_recipe(text, name="r.yaml", overrides=settings)
    return caught.value.all


def test_every_alias_means_a_field_and_no_alias_is_one() -> None:
    aliases = [alias for names in FIELD_ALIASES.values() for alias in names.split()]
    assert set(FIELD_ALIASES) <= set(all_fields())
    assert len(aliases) == len(set(aliases))
    for field, names in FIELD_ALIASES.items():
        for alias in names.split():
            assert field_for(alias, field.rpartition(".")[0]) == field


@pytest.mark.parametrize(
    ("text", "meant", "where"),
    [
        ("train: {learning_rate: 1.0e-4}", "'lr'", "train.learning_rate (r.yaml, line 1)"),
        ("train:\n  batch_size: 3", "'global_batch'", "train.batch_size (r.yaml, line 2)"),
        ("train: {num_epochs: 3}", "'data.epochs'", "train.num_epochs"),
        ("max_seq_length: 3", "'data.seq_len'", "max_seq_length (r.yaml, line 1)"),
        ("train: {seq_len: 3}", "'data.seq_len'", "train.seq_len"),
        ("model: {adapter: {r: 8}}", "'rank'", "model.adapter.r"),
        ("data: {mixture: [{name: a, sourc: text}]}", "'source'", "data.mixture.0.sourc"),
        ("train: {stepz: 3}", "'steps'", "train.stepz"),
    ],
)
def test_the_names_of_other_programs_get_the_right_field(text: str, meant: str, where: str) -> None:
    first = mistakes_of(text)[0]
    assert first.code == "R011"
    assert f"did you mean {meant}?" in first.what
    assert where in first.where


def test_a_mistake_of_set_is_not_blamed_on_the_file() -> None:
    text = "train:\n  steps: 3\n"
    (wrong,) = mistakes_of(text, "train.learning_rate=3")
    assert wrong.where == "train.learning_rate (--set)"
    (wrong,) = mistakes_of(text, "train.steps=many")
    assert wrong.where == "train.steps (--set)"
    (wrong,) = mistakes_of("train: {lr: -1}", "train.steps=4")
    assert wrong.where == "train.lr (r.yaml, line 1)"


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_its_lines() -> None:
    text = "name: a\nname: b\ntrain:\n  stepz: 3\n  lr: -1\ndata: {seq_len: abc}\ncheckpoint: {every: often}\n"
    found = mistakes_of(text, "plan.mesh.tpp=2", "nonsense")
    assert [each.code for each in found] == ["R004", "R010", "R011", "R013", "R012", "R013", "R011"]
    assert [re.findall(r"line (\d)", each.where) for each in found] == [["2"], [], ["4"], ["5"], ["6"], ["7"], []]
    assert "'auto' or 'off', or" in found[5].what
    assert found[0].as_dict()["others"][1]["code"] == "R011"
    assert str(found[0]).count("\n  fix:   ") == len(found)


def test_a_value_with_two_forms_is_one_mistake() -> None:
    assert len(mistakes_of("plan: {mesh: {tp: 0}}")) == 1
    assert len(mistakes_of("plan: autopilot")) == 1
    assert len(mistakes_of("faults: {ranks: [2, x]}")) == 1


@pytest.mark.parametrize(
    ("text", "says", "place"),
    [
        ("train:\n\tsteps: 3\n", "tab", "line 2, column 1"),
        ("train:\n  steps: 3\n  \tlr: 1\n", "tab", "line 3, column 3"),
        ("name: a\nmodel: {preset: tiny\ntrain:\n  steps: 3\n", "'{' is not closed", "line 2, column 8"),
        ("train: {steps: 3", "'{' is not closed", "line 1, column 8"),
        ("model: {freeze: [vision\ndata: {source: text}\n", "'[' is not closed", "line 1, column 17"),
        ("a: {b: 1,\n  c: 2 d: 3}\n", "expected ',' or '}'", "line 2, column 9"),
        ("name: 'a\ntrain: {steps: 3}\n", "quote is not closed", "line 1, column 7"),
        ("name: my run: x\n", "second ': '", "line 1, column 13"),
    ],
)
def test_a_syntax_error_is_named_where_it_is(text: str, says: str, place: str) -> None:
    (wrong,) = mistakes_of(text)
    assert wrong.code == "R001"
    assert says in wrong.what
    assert wrong.where == f"r.yaml, {place}"


def test_model_cluster_and_data_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: {preset: tiyn}\ncluster: 8xH1000\ndata: {source: text, path: gone.txt}\n")
    assert main(["train", "x.yaml", "--dry-run"]) == 2
    assert [line[:4] for line in capsys.readouterr().err.splitlines()[::3]] == ["M001", "C001", "T003"]
    assert main(["train", "x.yaml", "--dry-run", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert [error["code"], *(each["code"] for each in error["others"])] == ["M001", "C001", "T003"]


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["train", "--steps", "3"], "write --set train.steps=3"),
        (["train", "--learning-rate=3e-4"], "write --set train.lr=3e-4"),
        (["plan", "--batch-size", "4"], "write --set train.global_batch=4"),
        (["train", "--stepz", "3"], "write --set train.steps=3"),
        (["resume", "runs/x", "--max-steps", "9"], "write --set train.steps=9"),
        (["presets", "--rank", "4"], "see `trimaran presets --help`"),
    ],
)
def test_an_option_that_is_a_field_gets_the_set_that_means_it(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[2] == f"  fix:   {fix}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["finetune"], "did you mean 'train'?"),
        (["chat"], "did you mean 'generate'?"),
        (["inti"], "did you mean 'init'?"),
        (["mine.yaml", "--set", "a=b"], "trimaran train mine.yaml --set a=b"),
    ],
)
def test_an_unknown_command_gets_the_right_one(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_aliases_of_commands_are_no_commands() -> None:
    assert set(COMMAND_ALIASES) <= set(COMMANDS)
    aliases = [alias for names in COMMAND_ALIASES.values() for alias in names.split()]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_the_completion_script_of_a_named_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"complete_{'powershell' if shell == 'powershell' else shell}" in script
    assert main([f"--show-completion={shell}"]) == 0
    assert capsys.readouterr().out == script
    assert main(["--show-completion", "bsh"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err


def test_bash_completes_with_the_printed_script(tmp_path: Path) -> None:
    program = tmp_path / "trimaran"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trimaran "$@"\n')
    program.chmod(0o755)
    script = """
        set -e
        trimaran --show-completion bash > script && source ./script
        COMP_WORDS=(trimaran in) COMP_CWORD=1 && _trimaran_completion trimaran && echo "${COMPREPLY[@]}"
        COMP_WORDS=(trimaran train --set train.st) COMP_CWORD=3
        _trimaran_completion trimaran && echo "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["init incidents", "train.steps="]


def test_a_longer_schedule_that_changes_the_learning_rate_at_once_is_said() -> None:
    old = TrainSection(steps=100, lr=1e-3, schedule=Schedule(warmup_steps=10, floor=0.1))
    text = learning_rate_change(old, old.model_copy(update={"steps": 300}), 100)
    before = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    after = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 90 / 290)))
    assert f"from {before:.3g} to {after:.3g}" in text
    assert "step 101" in text
    assert "rises" in text
    assert learning_rate_change(old, old, 50) == ""
    constant = TrainSection(steps=100, schedule=Schedule(kind="constant"))
    assert learning_rate_change(constant, constant.model_copy(update={"steps": 300}), 100) == ""

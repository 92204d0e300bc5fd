"""The command line in real processes: start-up time, help, pipes, signals and completion."""

import json
import os
import platform
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from tests.runs import new_run, start_ranks
from trimaran.app import COMMANDS, main
from trimaran.runs import Journal

MAX_HELP_SECONDS = 0.3


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimaran", *arguments]
    options = {"env": environment()} | options  # with rates of this CPU, which `plan` would measure
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_help_is_fast_and_lists_every_command() -> None:
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # a busy machine takes longer, but uses the CPU as long
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert answer.returncode == 0
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", answer.stdout, re.MULTILINE)
    assert min(seconds) < MAX_HELP_SECONDS, seconds


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("plan", "--json")])
def test_torch_is_not_imported_for_help_and_plans(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trimaran", *arguments]
    imports = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert imports.returncode == 0
    modules = {line.rpartition("|")[2].strip() for line in imports.stderr.splitlines()}
    assert "trimaran.app.main" in modules
    assert not modules & {"torch", "transformers", "datasets"}


def test_the_top_level_imports_no_command() -> None:
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trimaran", "--help"], capture_output=True, text=True
    )
    assert not re.search(r"pydantic|rich|numpy|trimaran\.core", imports.stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    if inner := {"data": "pack", "bench": "calibrate"}.get(command):
        assert main([command, inner, "--help"]) == 0
        shown = capsys.readouterr().out
    assert re.search(rf"^  trimaran {command}", shown, re.MULTILINE)


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"trimaran \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: trimaran" in capsys.readouterr().out


def test_for_an_unknown_command_the_closest_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "there is no command 'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["train", "--stepz"], ["watch"], ["data"], ["data", "pack"], ["plan", "a", "b"], ["--foo"]]
)
def test_a_mistyped_command_line_is_one_clear_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line[:8] for line in shown.err.splitlines()] == ["A001: " + shown.err[6:8], "  where:", "  fix:  "]


def test_with_json_an_error_is_an_object_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--set", "train.stepz=3"]) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    error = json.loads(shown.out)["error"]
    assert error.keys() == {"code", "what", "where", "fix"}
    assert error["code"] == "R011"


def test_the_code_is_red_on_a_terminal_only(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trimaran", "trian"]
    own = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    subprocess.run(command, stderr=theirs, timeout=60, env=own)
    assert b"\x1b[31m" in os.read(ours, 4096)
    assert "\x1b" not in run("trian").stderr


def test_a_name_cannot_send_control_codes_to_the_terminal() -> None:
    done = run("watch", "runs/\x1b[2Jgone")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_a_character_that_cannot_be_shown_is_replaced() -> None:
    ascii_only = {**environment(), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert run("plan", env=ascii_only).returncode == 0
    assert run("watch", os.fsdecode(b"runs/\xff")).stderr.startswith("A001")


def test_a_closed_pipe_is_not_an_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trimaran", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_ctrl_c_leaves_watch_without_an_error(tmp_path: Path) -> None:
    run_directory = new_run(tmp_path / "run")
    start_ranks(run_directory)
    command = [sys.executable, "-m", "trimaran", "watch", str(run_directory.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"2 of 2 ranks ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert process.stderr.read() == b""


def test_the_schema_has_every_section_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    sections = {"name", "model", "data", "train", "checkpoint", "faults", "telemetry", "cluster", "nodes", "plan"}
    assert sections | {"autopilot", "objective"} == schema["properties"].keys()


def test_presets_are_printed_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^llama-3-8b +8\.0B +32 +4096 +32/8 +14336 +128256 +8192", table, re.MULTILINE)
    assert re.search(r"^qwen2-vl-7b +8\.3B", table, re.MULTILINE)
    assert "…" not in table
    assert main(["presets", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named["llama-3-8b"]["parameters"] == 8_030_261_248
    assert {"vlm/qwen2-vl-7b", "perception/tiny"} <= named.keys()


def complete(line: str, *, cwd: Path | None = None) -> list[str]:
    """Return bash's completions of the last word of `line`."""
    count = len(line.split()) - (0 if line.endswith(" ") else 1)
    variables = {"_TRIMARAN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    return run(env=environment(**variables), cwd=cwd).stdout.split()


def test_commands_options_and_fields_complete(tmp_path: Path) -> None:
    assert complete("trimaran pla") == ["plan"]
    assert complete("trimaran train --dry") == ["--dry-run"]
    assert complete("trimaran train --set train.st") == ["train.steps="]
    assert "plan.mesh.tp=" in complete("trimaran train --set plan.")
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.txt").touch()
    assert complete("trimaran train ", cwd=tmp_path) == ["mine.yaml"]


def test_watch_json_prints_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory = new_run(tmp_path / "run", world_size=1)
    with Journal(run_directory, 0) as journal:
        journal.event("start", host=platform.node(), pid=os.getpid())
    assert main(["watch", str(run_directory.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "starting"


def test_a_run_is_found_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == "runs/mine"
    assert main(["watch", "yours", "--json"]) == 2
    assert main(["generate", "mine"]) == 2
    assert "A009" in capsys.readouterr().err

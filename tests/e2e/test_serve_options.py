"""`trimaran serve`: options that contradict each other, and the command of vLLM."""

import shutil
from pathlib import Path

import pytest

from tests.serving import add_checkpoint, new_tiny_run
from trimaran.app import main


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--follow", "--step", "1"], "U014"),
        (["--dry-run"], "U014"),
        (["--adapter", "law"], "U014"),
        (["--adapter", "law=missing"], "U014"),
        (["--host", "no.such.host.invalid"], "W001"),
        (["--step", "5"], "K0"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, options: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_tiny_run(tmp_path / "run")
    add_checkpoint(run, 1)
    assert main(["serve", str(run.path), *options]) == 2
    assert capsys.readouterr().err.startswith(code)


def test_vllm_is_started_with_a_checked_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_tiny_run(tmp_path / "run")
    add_checkpoint(run, 1)
    arguments = ["serve", str(run.path), "--engine", "vllm", "--tp", "2"]
    assert main([*arguments, "--dry-run"]) == 0
    export, *_, command = capsys.readouterr().out.splitlines()
    folder = run.path / "exports" / "step-00000001-hf"
    assert export.startswith(f"trimaran export {run.path} --step 1")
    assert command == f"VLLM_API_KEY=TOKEN vllm serve {folder} --config vllm.yaml"
    if shutil.which("vllm") is None:
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("U013: vLLM is not installed")

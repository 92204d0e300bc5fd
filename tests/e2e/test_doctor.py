"""`trimaran doctor` on this machine, and the checks of `train` before it starts ranks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from trimaran.app import interface_to, main, refuse_unfit_machine, resolve

TINY = ["--set", "cluster=2xcpu", "--set", "train.steps=2"]


def answer(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_quick_checks_pass_on_this_machine(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = answer(capsys, "--quick", *TINY)
    assert (code, printed["counts"]["fail"], printed["exit"]) == (0, 0, 0)
    by_code = {each["code"]: each for each in printed["checks"]}
    assert by_code["H014"]["status"] in ("pass", "warn")
    assert "the run writes" in by_code["H010"]["what"]
    assert by_code["H016"]["status"] == "skip"
    assert list(tmp_path.iterdir()) == []


def test_the_checklist_is_shown_with_its_fixes(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["doctor", "--quick"]) == 0
    shown = capsys.readouterr().out
    assert "WARN H007 environment variables" in shown
    assert "fix unset NCCL_TIMEOUT" in shown
    assert "skipped" in shown.splitlines()[-1]


def test_a_recipe_that_no_plan_fits_fails(capsys: Any) -> None:
    code, printed = answer(capsys, "--quick", "--set", "model.preset=llama-3-70b", "--set", "cluster=1xH100")
    found = next(each for each in printed["checks"] if each["code"] == "H014")
    assert (code, found["status"], found["what"][:4]) == (2, "fail", "P007")


def test_an_invalid_recipe_is_not_blamed_on_the_machine(capsys: Any) -> None:
    assert main(["doctor", "--quick", "--json", "--set", "train.stepps=3"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "R011"


def test_a_run_that_cannot_work_here_is_not_started(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["train", *TINY, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "H007" in error
    assert "--no-check" in error
    assert not (tmp_path / "run").exists()


def test_the_checks_before_a_run_are_fast() -> None:
    request = resolve(None, ["cluster=2xcpu"])
    refuse_unfit_machine(request)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        refuse_unfit_machine(request)
        best = min(best, time.process_time() - start)
    assert best < 0.05


def test_the_interface_to_other_nodes_is_found() -> None:
    assert interface_to("127.0.0.1:29400") == "lo"
    assert interface_to("nosuchhost.invalid:29400") == ""


@pytest.mark.slow
def test_all_checks_pass_on_this_machine(tmp_path: Path) -> None:
    start = time.monotonic()
    done = forked.run("trimaran", "doctor", "--json", *TINY, cwd=tmp_path)
    took = time.monotonic() - start
    printed = json.loads(done.stdout)
    found = {each["code"]: each for each in printed["checks"]}
    assert done.returncode == 0, printed
    assert found["H016"]["status"] == "pass"
    assert found["H017"]["evidence"]["bus_bandwidth"] > 1e6
    assert found["H015"]["status"] in ("pass", "warn")
    assert found["H011"]["status"] == "pass"
    assert took < 60, took  # ten seconds on a quiet machine


@pytest.mark.slow
def test_a_failed_measurement_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is damaged')")
    command = [sys.executable, "-m", "trimaran", "doctor", "--json"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    printed = json.loads(subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE).stdout)
    found = next(each for each in printed["checks"] if each["code"] == "H015")
    assert (found["status"], found["what"].endswith("libtorch.so is damaged")) == ("skip", True)

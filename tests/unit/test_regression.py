"""`benchmarks/regression.py`: ratios of results against the stored ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.regression import NOTHING, OK, REGRESSED, STORED, main, ratios, read_stored


def line(peer: str, milliseconds: list[float], **changes: Any) -> dict[str, Any]:
    """Return a line with windows of two steps; each window has one time per step."""
    record = {"contest": "small-160m", "peer": peer, "device": "a GPU", "torch": "2.11", "version": f"{peer} 1.0"}
    record |= {"seconds": [each / 1000 for each in milliseconds for _ in range(2)], "window": 2}
    return record | {"tokens_per_step": 16_384, "time": 1_790_000_000} | changes


def results(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return str(path)


@pytest.fixture
def stored(tmp_path: Path) -> list[str]:
    """Return the options that name a file in which 1.25 of the loop and 2.0 of the HF Trainer are stored."""
    options = ["--stored", str(tmp_path / "ratios.json")]
    peers = line("loop+plain", [30, 30, 30]), line("hf_trainer", [48, 48, 48]), line("trimaran", [24, 24, 24])
    assert main([results(tmp_path / "first.jsonl", *peers), "--update", *options]) == OK
    return options


def test_a_ratio_is_that_of_the_medians_over_windows_and_its_spread_that_of_single_ones() -> None:
    rounds = [line("loop+plain", [30, 33]), line("loop+plain", [30]), line("trimaran", [24, 24, 20])]
    (found,) = ratios(rounds)
    assert found.ratio == 1.25
    assert (found.lowest, found.highest, found.num) == (1.25, 1.5, 3)
    assert (found.trimaran, found.peer, found.date) == ("trimaran", "loop+plain", "2026-09-21")


def test_a_loss_of_more_than_three_percent_is_reported(
    tmp_path: Path, stored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    slower = results(tmp_path / "now.jsonl", line("loop+plain", [30, 30]), line("trimaran", [24.9, 24.9]))
    assert main([slower, *stored]) == REGRESSED
    out = capsys.readouterr().out
    assert "REGRESSED small-160m: trimaran / loop+plain 1.205 (2 windows, 1.205 to 1.205), stored 1.250" in out
    assert "-3.6%" in out
    assert "stored, but not measured completely: small-160m" in out  # the HF Trainer did not run


def test_a_loss_of_less_than_three_percent_holds(tmp_path: Path, stored: list[str]) -> None:
    assert main([results(tmp_path / "now.jsonl", line("loop+plain", [30]), line("trimaran", [24.6])), *stored]) == OK


def test_every_peer_of_a_contest_is_compared(
    tmp_path: Path, stored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    faster_peer = line("loop+plain", [30]), line("hf_trainer", [40]), line("trimaran", [24])
    assert main([results(tmp_path / "now.jsonl", *faster_peer), *stored, "--json"]) == REGRESSED
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [pair[0]["peer"] for pair in answer["regressed"]] == ["hf_trainer"]
    assert [pair[0]["peer"] for pair in answer["held"]] == ["loop+plain"]


def test_windows_far_apart_are_said(tmp_path: Path, stored: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    noisy = results(tmp_path / "now.jsonl", line("loop+plain", [30, 30, 30]), line("trimaran", [20, 24, 29]))
    assert main([noisy, *stored]) == OK
    assert "measure again" in capsys.readouterr().out


def test_another_device_or_only_failures_have_nothing_to_compare(tmp_path: Path, stored: list[str]) -> None:
    other = line("loop+plain", [30], device="a CPU"), line("trimaran", [90], device="a CPU")
    assert main([results(tmp_path / "other.jsonl", *other), *stored]) == NOTHING
    failed = {"contest": "small-160m", "peer": "trimaran", "failed": "OutOfMemoryError"}
    assert main([results(tmp_path / "failed.jsonl", line("loop+plain", [30]), failed), *stored]) == NOTHING


def test_the_stored_ratios_can_be_read() -> None:
    entries = read_stored(STORED)
    assert ("1b", "trimaran", "torchtitan", "NVIDIA H200") in entries
    assert all(each.lowest <= each.ratio <= each.highest for each in entries.values())

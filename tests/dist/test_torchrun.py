"""A run whose ranks somebody else starts, with the environment that torchrun gives them: it goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from trimaran.app.cli.main import main
from trimaran.telemetry import Section
from trimaran.train.ties import Ties

SETTINGS = ["model.shape={layers: 1, hidden: 32, heads: 4, kv_heads: 2, ffn: 64}", "data.seq_len=32", "train.steps=12",
            "train.global_batch=8", "train.sample.tokens=0", "train.evaluate.batches=0",
            "checkpoint.every=3"]  # fmt: skip


def train(path: Path, *settings: str) -> int:
    return main(
        ["train", "--run-dir", str(path), *(word for each in [*SETTINGS, *settings] for word in ("--set", each))]
    )


def train_and_die(path: Path) -> int:
    enter = Ties.enter

    def enter_and_die(self: Ties, section: Section, step: int = 0) -> None:
        if os.environ["RANK"] == "1" and step == 8:
            os._exit(9)
        enter(self, section, step)

    Ties.enter = enter_and_die  # type: ignore[method-assign]
    return train(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_command_goes_on_with_its_run_and_another_recipe_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(AssertionError) as died:
        run_ranks(2, train_and_die, run)
    assert (run / "metrics.jsonl").exists(), died.value
    assert lines(run / "metrics.jsonl")[-1]["step"] < 12
    assert run_ranks(2, train, run, "train.lr=0.5") == [2, 2]
    assert run_ranks(2, train, run) == [0, 0]
    assert [each["step"] for each in lines(run / "metrics.jsonl")] == list(range(1, 13))
    assert [each["step"] for each in lines(run / "events" / "rank-0.jsonl") if each["kind"] == "ready"][-1] >= 3

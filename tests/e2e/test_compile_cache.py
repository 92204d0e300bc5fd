"""The second start of a compiled run uses the compile cache of the first."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.environment import environment

pytestmark = pytest.mark.slow  # a first compilation takes most of a minute on two cores

SETTINGS = (
    "model.shape={layers: 2}",
    "data.seq_len=32",
    "train.steps=6",
    "train.global_batch=2",
    "train.save=false",
    "train.sample.tokens=0",
    "train.evaluate.batches=0",
    "cluster=1xcpu",
    "plan.compile=true",
)


def started(folder: Path, cache: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the compile statistics of the `started` event, and the metrics."""
    arguments = [argument for each in SETTINGS for argument in ("--set", each)]
    words = ("train", "--quiet", "--run-dir", str(folder), *arguments)
    forked.run("trimaran", *words, env=environment(TRIMARAN_CACHE=str(cache)), check=True, timeout=500)
    events = [json.loads(line) for line in (folder / "events" / "rank-0.jsonl").read_text().splitlines()]
    (event,) = [each for each in events if each["kind"] == "started"]
    return event["data"]["compile"], [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    cold, _ = started(tmp_path / "cold", tmp_path / "cache")
    warm, lines = started(tmp_path / "warm", tmp_path / "cache")
    assert cold["cache_misses"] > 0
    assert warm["cache_misses"] == 0
    assert warm["cache_hits"] == cold["cache_hits"] + cold["cache_misses"]
    assert warm["seconds"] < cold["seconds"] / 2
    assert [line["recompiles"] for line in lines] == [0] * 6
    assert lines[0]["compiles"] == lines[-1]["compiles"] > 0

"""The fast parser of metrics lines gives the same result as JSON."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import new_run, step_metrics
from trimaran.core import StepMetrics
from trimaran.runs import Journal, StepLine, read_details, read_step

DETAILS = {"waits": {"data": 0.5}, "router": {"imbalance": 1.5, "dropped": [0, {"a": "}\n"}]}}


def as_metrics(line: StepLine) -> StepMetrics:
    values = line._asdict()
    return StepMetrics(details=read_details(values.pop("rest")), **values)


def written(tmp_path: Path, *steps: StepMetrics) -> list[bytes]:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        for step in steps:
            journal.step(step)
    return run.metrics.read_bytes().splitlines(keepends=True)


def test_a_line_of_the_journal_takes_the_fast_path(tmp_path: Path) -> None:
    step = replace(step_metrics(7, loss=1.5e-12), details=DETAILS, lr=0.0)
    (line,) = written(tmp_path, step)
    found = read_step(line)
    assert found is not None
    assert line.endswith(found.rest), "its details are not parsed"
    assert as_metrics(found) == step


@pytest.mark.parametrize("order", ["as written", "another"])
def test_the_json_path_gives_the_same_result(tmp_path: Path, order: str) -> None:
    step = replace(step_metrics(7, loss=2.0), details=DETAILS)
    (line,) = written(tmp_path, step)
    tree = json.loads(line)
    names = list(tree) if order == "as written" else sorted(tree)
    slow = json.dumps({name: tree[name] for name in names}).encode() + b"\n"
    found = read_step(slow)
    assert found is not None
    assert not slow.endswith(found.rest)
    assert as_metrics(found) == step


def test_an_infinite_loss_is_read_as_nan(tmp_path: Path) -> None:
    (line,) = written(tmp_path, replace(step_metrics(1, loss=math.inf), details=DETAILS))
    found = read_step(line)
    assert found is not None
    assert math.isnan(found.loss)
    assert read_details(found.rest) == DETAILS


@pytest.mark.parametrize("line", [b"", b"\n", b"[]\n", b'{"step": 1}\n', b'{"step":1,"lo', b'"<script>"\n', b"\xff\n"])
def test_a_line_that_is_not_a_step_is_none(line: bytes) -> None:
    assert read_step(line) is None


def test_a_step_with_text_instead_of_numbers_is_none(tmp_path: Path) -> None:
    (line,) = written(tmp_path, step_metrics(1, loss=2.0))
    assert read_step(line.replace(b'"loss":2.0', b'"loss":"<script>"')) is None
    assert read_step(line.replace(b'"phases":{', b'"phases":[{').replace(b'},"time"', b'}],"time"')) is None


def test_damaged_details_are_empty(tmp_path: Path) -> None:
    (line,) = written(tmp_path, replace(step_metrics(1, loss=2.0), details=DETAILS))
    found = read_step(line.replace(b'"imbalance"', b'"imbal'))
    assert found is not None
    assert read_details(found.rest) == {}

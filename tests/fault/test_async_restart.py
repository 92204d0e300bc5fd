"""A killed worker of asynchronous training: the run restarts from its newest state and ends as usual."""

import json
from pathlib import Path

import pytest

from tests.fault.harness import Supervised, lines
from trimaran.core import EXIT_DONE


@pytest.mark.chaos
def test_a_killed_worker_restarts_the_run_from_the_last_pause(tmp_path: Path) -> None:
    settings = (
        "plan.engine=async",
        "plan.comm.async_sgd={staleness: 2, pause_every: 4}",
        "train.steps=24",
        "checkpoint.memory=4",
    )
    kills = ",".join(f"kill:1:{step}:0" for step in range(12, 20))  # which steps rank 1 takes part in is not known
    with Supervised.start(tmp_path / "run", *settings, fault=kills, pause=0.01) as supervised:
        assert supervised.wait() == EXIT_DONE
    assert [each.action for each in supervised.faults] == ["restarted"]
    events = [json.loads(line) for line in supervised.run.events(0).read_text().splitlines()]
    (resumed,) = [each for each in events if each["kind"] == "resume"]
    assert resumed["data"]["refused"] == []
    assert resumed["step"] % 4 == 0
    assert resumed["step"] >= 4
    assert [line["step"] for line in lines(supervised.run.metrics)] == [*range(1, 25)]

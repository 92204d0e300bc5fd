"""Elastic replicas under a real supervisor: one is killed, at any point, and the others go on; it joins again."""

import json
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fault.harness import SECONDS, Supervised, lines, wait_for
from trimaran.data import TokenShards, cache_folder, positions, prepare, split

EVERY, BATCH = 5, 12
LOCAL = f"{{steps: {EVERY}, elastic: true, outer: {{optimizer: nesterov}}}}"


def start(tmp_path: Path, *settings: str, replicas: int = 3, steps: int = 40, faults: str = "", pause: float = 0.0,
          local: str = LOCAL, ranks: int = 0) -> Supervised:  # fmt: skip
    (tmp_path / "samples").mkdir()
    extra = {
        "TRIMARAN_TEST_PLUGIN": "tests.fault.replica_plugin",
        "TRIMARAN_TEST_REPLICA_FAULTS": faults,
        "TRIMARAN_TEST_SAMPLES": str(tmp_path / "samples"),
        "TRIMARAN_TEST_PAUSE": str(pause),
    }
    overrides = [f"train.steps={steps}", f"train.global_batch={BATCH}", f"plan.comm.local_steps={local}",
                 f"plan.mesh.dp_replicate={replicas}", *settings]  # fmt: skip
    return Supervised.start(tmp_path / "run", *overrides, ranks=ranks or replicas, extra=extra)


def losses(supervised: Supervised) -> list[float]:
    found = lines(supervised.run.metrics)
    assert [each["step"] for each in found] == list(range(1, len(found) + 1))
    return [each["loss"] for each in found]


def trained(tmp_path: Path) -> dict[tuple[int, int], dict[int, list[int]]]:
    """Return the samples of each step, by rank and start."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for path in (tmp_path / "samples").iterdir():
        rank, number = path.stem.split("-")
        found[int(rank), int(number)] = dict(json.loads(line) for line in path.read_text().splitlines())
    return found


def assert_each_sample_once(tmp_path: Path, supervised: Supervised, steps: int) -> None:
    """Fail unless the samples that contributed are the first ones of the order, each once."""
    changes = {each["step"]: each["data"] for rank in range(3) for each in supervised.events(rank, "replicas")}
    losses_of = {rank: sum(rank in each.suspects for each in supervised.faults) for rank in range(3)}
    consumed: list[int] = []
    for (rank, number), of_step in trained(tmp_path).items():
        is_lost = number < losses_of[rank]
        ready = supervised.events(rank, "ready")
        began = ready[number]["step"] if number < len(ready) else 0
        reached = last_contribution(rank, began, changes, max(of_step)) if is_lost else steps
        consumed += chain.from_iterable(ids for step, ids in of_step.items() if step <= reached)
    assert len(consumed) == len({*consumed})
    num_rows, length = len(consumed), num_samples(supervised)
    assert 0 < num_rows < length
    expected = positions(supervised.run.read_recipe().train.seed, np.arange(num_rows), length)
    assert {*consumed} == {*expected.tolist()}


def last_contribution(rank: int, began: int, changes: dict[int, Any], reached: int) -> int:
    """Return the last synchronisation that a lost rank contributed to: the one before it was first missed."""
    missed = [step for step, data in changes.items() if step > began and rank not in data["replicas"]]
    return min(missed) - EVERY if missed else reached


def num_samples(supervised: Supervised) -> int:
    """Return how many training sequences the run has."""
    data = supervised.run.read_recipe().data
    return len(split(TokenShards.open(prepare(data, cache=cache_folder(os.environ))), data)[0])


@pytest.mark.chaos
def test_a_healthy_run_trains_as_replicas_that_are_not_elastic(tmp_path: Path) -> None:
    found = []
    for name, local in (("elastic", LOCAL), ("plain", LOCAL.replace("elastic: true, ", ""))):
        (tmp_path / name).mkdir()
        with start(tmp_path / name, replicas=2, steps=20, local=local) as supervised:
            assert supervised.wait(SECONDS) == 0, supervised.run.agent_log.read_text()
            assert supervised.attempts() == 1
            assert supervised.faults == []
            found.append(losses(supervised))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_killed_replica_joins_again_and_another_leaves_while_the_first_trains_every_step_once(tmp_path: Path) -> None:
    with start(tmp_path, steps=100, pause=0.3, faults="exchange:1:10") as supervised:
        supervised.wait_for_events(1, "ready", 2)
        joined = supervised.events(1, "ready")[-1]["step"]
        assert joined % EVERY == 0
        supervised.wait_for_step(joined + 1)
        supervised.send_signal(2, signal.SIGTERM)
        supervised.wait_for_events(2, "stop", 1)
        supervised.remove_pause()
        assert supervised.wait() == 0, supervised.run.agent_log.read_text()
        assert supervised.attempts() == 1
        assert len(losses(supervised)) == 100
        killed, left = supervised.faults
        assert (killed.cause, killed.action, killed.suspects) == ("crash", "continued", (1,))
        assert (left.cause, left.action, left.cost) == ("preempted", "continued", {"lost_steps": 0.0})
        assert [len(supervised.events(rank, "start")) for rank in range(3)] == [1, 2, 1]
        of_step, (stopped,) = trained(tmp_path), supervised.events(2, "stop")
        assert [*of_step[0, 0]] == list(range(1, 101))
        assert [*of_step[2, 0]] == list(range(1, stopped["step"] + 1)), (
            "it finished its round, and is not started again"
        )
        samples = {each["step"]: each["samples"] for each in lines(supervised.run.metrics)}
        assert samples[5] == BATCH
        assert samples[10] == BATCH * 2 // 3  # what the killed one trained since step 5 does not count
        assert samples[joined + 1] == samples[stopped["step"]] == BATCH, "what the leaving one trained counts"
        assert samples[stopped["step"] + 1] == BATCH * 2 // 3
        assert (supervised.run.model / "config.json").exists()
        assert_each_sample_once(tmp_path, supervised, 100)


@pytest.mark.chaos
def test_a_replica_killed_before_its_vote_costs_the_others_no_step(tmp_path: Path) -> None:
    with start(tmp_path, steps=30, faults="vote:1:10") as supervised:
        assert supervised.wait(SECONDS) == 0, supervised.run.agent_log.read_text()
        assert supervised.attempts() == 1
        assert len(losses(supervised)) == 30
        (incident,) = supervised.faults
        assert incident.action == "continued"
        assert incident.suspects == (1,)
        assert len(supervised.events(0, "start")) == len(supervised.events(2, "start")) == 1
        of_step = trained(tmp_path)
        for rank in (0, 2):  # each of their steps was trained once
            assert [*of_step[rank, 0]] == list(range(1, 31))
        samples = {each["step"]: each["samples"] for each in lines(supervised.run.metrics)}
        assert samples[5] == BATCH
        assert samples[10] == BATCH * 2 // 3  # what the killed one trained since step 5 does not count
        assert_each_sample_once(tmp_path, supervised, 30)


def assert_one_left(tmp_path: Path, supervised: Supervised, left: int, steps: int) -> None:
    """Fail unless one replica has left at a synchronisation, and the others have trained every step once."""
    assert supervised.attempts() == 1
    assert len(losses(supervised)) == steps
    (incident,) = supervised.faults
    assert (incident.cause, incident.action, incident.cost) == ("preempted", "continued", {"lost_steps": 0.0})
    assert incident.evidence["replica"] == left
    (stopped,) = supervised.events(left, "stop")
    assert stopped["step"] % EVERY == 0
    assert 0 < stopped["step"] < steps
    of_step = trained(tmp_path)
    assert [*of_step[left, 0]] == list(range(1, stopped["step"] + 1)), "it finished its round, and is not started again"
    for rank in {0, 1, 2} - {left}:
        assert len(supervised.events(rank, "start")) == 1
        assert [*of_step[rank, 0]] == list(range(1, steps + 1))
    samples = {each["step"]: each["samples"] for each in lines(supervised.run.metrics)}
    assert samples[stopped["step"]] == BATCH, "what it trained counts"
    assert samples[stopped["step"] + 1] == BATCH * 2 // 3
    assert_each_sample_once(tmp_path, supervised, steps)


@pytest.mark.chaos
def test_the_replica_that_writes_metrics_and_saves_leaves_alone(tmp_path: Path) -> None:
    left = 0
    with start(tmp_path, "checkpoint.every=10", steps=40, pause=0.1) as supervised:
        supervised.wait_for_step(EVERY, SECONDS)
        supervised.send_signal(left, signal.SIGTERM)
        assert supervised.wait(SECONDS) == 0, supervised.run.agent_log.read_text()
        assert_one_left(tmp_path, supervised, left, 40)
        assert (supervised.run.model / "config.json").exists()


@pytest.mark.chaos
def test_two_of_three_are_killed_and_the_last_goes_on_alone_until_they_join(tmp_path: Path) -> None:
    with start(tmp_path, steps=200, pause=0.1) as supervised:
        supervised.wait_for_step(10, SECONDS)
        supervised.send_signal(0, signal.SIGKILL)  # it writes the metrics
        wait_for(lambda: len(supervised.faults) == 1, SECONDS)
        supervised.send_signal(2, signal.SIGKILL)
        assert supervised.wait(SECONDS) == 0, supervised.run.agent_log.read_text()
        assert supervised.attempts() == 1
        assert len(losses(supervised)) == 200
        assert [*trained(tmp_path)[1, 0]] == list(range(1, 201))
        assert [each.action for each in supervised.faults] == ["continued"] * 2
        for rank in (0, 2):
            first, second = supervised.events(rank, "ready")
            assert first["step"] == 0 < second["step"]
            assert second["step"] % EVERY == 0
        counts = [each["samples"] for each in lines(supervised.run.metrics)]
        assert counts[0] == counts[-1] == BATCH
        assert min(counts) < BATCH
        assert_each_sample_once(tmp_path, supervised, 200)

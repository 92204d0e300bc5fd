"""Elastic replicas: joins that fail, hung replicas, sharded ones, the end of a run, and stops."""

import json
import signal
from pathlib import Path

import pytest

from tests.fault.harness import SECONDS, Supervised, lines, wait_for
from tests.fault.test_elastic_replicas import (
    BATCH,
    EVERY,
    assert_each_sample_once,
    losses,
    start,
    trained,
)
from trimaran.checkpoint import complete_steps, step_path

pytestmark = pytest.mark.chaos


def finish(supervised: Supervised, *, attempts: int = 1) -> None:
    assert supervised.wait(SECONDS) == 0, supervised.run.agent_log.read_text()
    assert supervised.attempts() == attempts


def test_a_replica_that_is_killed_while_it_joins_joins_later(tmp_path: Path) -> None:
    with start(tmp_path, steps=250, pause=0.1, faults="exchange:1:10,receive:1:0:1") as supervised:
        finish(supervised)
        assert len(losses(supervised)) == 250
        assert [each.suspects for each in supervised.faults] == [(1,), (1,)]
        assert len(supervised.events(1, "ready")) == 2  # its second start never got the state
        assert [*trained(tmp_path)[0, 0]] == list(range(1, 251))
        assert lines(supervised.run.metrics)[-1]["samples"] == BATCH


def test_a_replica_that_hangs_in_the_exchange_is_given_up(tmp_path: Path) -> None:
    with start(tmp_path, "faults.hang_seconds=6", steps=30, faults="stop-exchange:2:10") as supervised:
        finish(supervised)
        (incident,) = supervised.faults
        assert (incident.cause, incident.action, incident.suspects) == ("hang", "continued", (2,))
        assert [*trained(tmp_path)[0, 0]] == list(range(1, 31))
        assert len(losses(supervised)) == 30


def test_sharded_replicas_lose_and_get_back_both_ranks(tmp_path: Path) -> None:
    mesh = ("plan.mesh.dp_shard=2", "plan.sharding=parameters")
    local = f"{{steps: {EVERY}, elastic: true, outer: {{optimizer: nesterov}}, compression: int8}}"
    with start(tmp_path, *mesh, replicas=2, ranks=4, steps=200, pause=0.1, local=local) as supervised:
        supervised.wait_for_step(10, SECONDS)
        supervised.send_signal(3, signal.SIGKILL)
        finish(supervised)
        (incident,) = supervised.faults
        assert incident.evidence["replica"] == 1
        for rank in (0, 1):
            assert [*trained(tmp_path)[rank, 0]] == list(range(1, 201))
        for rank in (2, 3):
            assert len(supervised.events(rank, "start")) == 2
            assert supervised.events(rank, "ready")[-1]["step"] > 10
        assert len(losses(supervised)) == 200
        assert lines(supervised.run.metrics)[-1]["samples"] == BATCH


def test_another_replica_saves_the_end_if_the_first_is_killed_then(tmp_path: Path) -> None:
    with start(tmp_path, steps=20, faults="end:0:20") as supervised:
        finish(supervised)
        assert [*supervised.run.model.glob("*.safetensors")]
        assert supervised.events(1, "trained")
        assert not supervised.events(0, "trained")
        assert len(losses(supervised)) == 20


@pytest.mark.parametrize("kind", ["average", "sparse"])
def test_a_replica_joins_with_every_kind_of_outer_state(tmp_path: Path, kind: str) -> None:
    extra = "compression: sparse" if kind == "sparse" else "outer: {optimizer: average}"
    local = f"{{steps: {EVERY}, elastic: true, {extra}}}"
    with start(tmp_path, replicas=2, steps=150, pause=0.1, local=local, faults="after:0:10") as supervised:
        finish(supervised)
        assert len(supervised.events(0, "ready")) == 2
        assert lines(supervised.run.metrics)[-1]["samples"] == BATCH
        assert lines(supervised.run.metrics)[-1]["loss"] < lines(supervised.run.metrics)[0]["loss"]


def test_a_stopped_run_resumes_with_the_rows_that_were_not_consumed(tmp_path: Path) -> None:
    with start(tmp_path, "faults.restart=false", steps=60, pause=0.1) as supervised:
        supervised.wait_for_step(10, SECONDS)
        supervised.send_signal(1, signal.SIGKILL)  # it is not started again
        wait_for(lambda: supervised.events(0, "replicas"), SECONDS)
        supervised.process.terminate()
        assert supervised.wait(SECONDS) == 75, supervised.run.agent_log.read_text()
        stopped = supervised.step()
        manifest = json.loads((step_path(supervised.run.checkpoints, stopped) / "manifest.json").read_text())
        rows = manifest["progress"]["rows"]
        waiting = sum(stop - begin for begin, stop in rows["returned"])
        consumed = sum(each["samples"] for each in lines(supervised.run.metrics))
        assert rows["next_row"] - waiting == consumed
        assert 0 < stopped < 60
        assert stopped % EVERY == 0
    with Supervised.again(supervised.run, pause=0.0) as again:
        assert again.wait(SECONDS) == 0, again.run.agent_log.read_text()
        assert len(losses(again)) == 60
        ready = [each["step"] for rank in range(3) for each in again.events(rank, "ready")[-1:]]
        assert ready == [stopped] * 3
        counts = [each["samples"] for each in lines(again.run.metrics)]
        assert counts[stopped - 1] == BATCH * 2 // 3
        assert counts[stopped] == BATCH


def test_samples_count_once_over_many_losses(tmp_path: Path) -> None:
    faults = "exchange:1:10,after:2:110,vote:0:210"  # each has time to join before the next is lost
    with start(tmp_path, steps=300, pause=0.1, faults=faults) as supervised:
        finish(supervised)
        assert len(supervised.faults) == 3
        assert len(losses(supervised)) == 300
        assert_each_sample_once(tmp_path, supervised, 300)


def test_checkpoints_go_on_when_another_replica_saves_them(tmp_path: Path) -> None:
    settings = ("checkpoint.every=5", "checkpoint.keep=2", "faults.restart=false")  # the first one never comes back
    with start(tmp_path, *settings, replicas=2, steps=60, faults="after:0:20") as supervised:
        finish(supervised)
        assert len(losses(supervised)) == 60
        saved = {rank: [each["step"] for each in supervised.events(rank, "checkpoint")] for rank in range(2)}
        assert saved[0]
        assert max(saved[0]) <= 20 < min(saved[1])
        steps = complete_steps(supervised.run.checkpoints)
        assert steps[-1] == 60
        assert len(steps) <= 3
    with Supervised.again(supervised.run) as again:
        assert again.wait(SECONDS) == 0, again.run.agent_log.read_text()
        assert [again.events(rank, "ready")[-1]["step"] for rank in range(2)] == [60, 60]

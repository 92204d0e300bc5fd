"""Elastic replicas on several nodes that share a disk: a node is lost, the others go on, and it joins again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.nodes import Machine, make_run
from tests.elastic_runs import last_step
from tests.fault.harness import ROOT, lines, wait_for
from trimaran.runs import RunDirectory, read_holder, read_incidents

pytestmark = pytest.mark.chaos
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PAUSE = {"TRIMARAN_TEST_PAUSE": "0.25", "PYTHONPATH": str(ROOT / "src")}
FLAGS = ("--nodes", "3", "--ranks-per-node", "1", "--no-check")
SECONDS = 300.0
STEPS, EVERY, BATCH = 320, 5, 12
LOCAL = f"plan.comm.local_steps={{steps: {EVERY}, elastic: true, outer: {{optimizer: nesterov}}}}"


@contextmanager
def three_nodes(tmp_path: Path) -> Iterator[tuple[RunDirectory, dict[str, Machine]]]:
    settings = (f"train.steps={STEPS}", f"train.global_batch={BATCH}", "plan.mesh.dp_replicate=3", LOCAL)
    run = make_run(tmp_path / "run", *settings, nodes=3)
    machines = {address: Machine(run, address, FLAGS, environment=PAUSE) for address in ADDRESSES}
    try:
        wait_for(lambda: last_step(run) >= 2 * EVERY or any_ended(machines), SECONDS)
        assert not any_ended(machines), logs(machines)
        yield run, machines
    finally:
        for machine in machines.values():
            machine.lose()


def any_ended(machines: dict[str, Machine]) -> bool:
    return any(each.process.poll() is not None for each in machines.values())


def logs(machines: dict[str, Machine]) -> str:
    return "\n".join(each.log.read_text()[-2000:] for each in machines.values())


def others(run: RunDirectory, machines: dict[str, Machine]) -> list[Machine]:
    """Return the nodes that follow, not the one that coordinates."""
    holder = read_holder(run)
    assert holder is not None
    coordinator = holder.address.rpartition(":")[0]
    return [machine for address, machine in machines.items() if address != coordinator]


def test_a_lost_node_costs_the_others_no_step_and_joins_again(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as (run, machines):
        lost = others(run, machines)[0]
        pids = {rank: lines(run.events(rank))[0]["data"]["pid"] for rank in range(3)}
        lost.lose()
        wait_for(lambda: any(each["samples"] < BATCH for each in lines(run.metrics)), SECONDS)
        lost.come_back()
        codes = [machine.wait(SECONDS) for machine in machines.values()]
        assert codes == [0, 0, 0], logs(machines)
        found = lines(run.metrics)
        assert [each["step"] for each in found] == list(range(1, STEPS + 1))
        assert found[-1]["samples"] == BATCH
        assert sum("world_size" in each for each in lines(run.attempts)) == 1
        starts = {
            rank: [each["data"]["pid"] for each in lines(run.events(rank)) if each["kind"] == "start"]
            for rank in range(3)
        }
        (again,) = [rank for rank, started in starts.items() if len(started) == 2]
        assert all(starts[rank] == [pids[rank]] for rank in range(3) if rank != again)
        (incident,) = [each for each in read_incidents(run) if each.cause == "host"]
        assert incident.action == "continued"
        assert incident.evidence["replica"] == again
        assert incident.evidence["joined_at_step"] % EVERY == 0


def test_a_killed_rank_of_another_node_is_started_again_there(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as (run, machines):
        rank = 2
        os.kill(lines(run.events(rank))[0]["data"]["pid"], signal.SIGKILL)
        codes = [machine.wait(SECONDS) for machine in machines.values()]
        assert codes == [0, 0, 0], logs(machines)
        assert [each["step"] for each in lines(run.metrics)] == list(range(1, STEPS + 1))
        assert len([each for each in lines(run.events(rank)) if each["kind"] == "start"]) == 2
        assert sum("world_size" in each for each in lines(run.attempts)) == 1


def test_a_node_that_is_asked_to_stop_leaves_alone_and_another_takes_its_place(tmp_path: Path) -> None:
    with three_nodes(tmp_path) as (run, machines):
        leaving = others(run, machines)[0]
        pids = {rank: lines(run.events(rank))[0]["data"]["pid"] for rank in range(3)}
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.wait(SECONDS) == 75, logs(machines)
        wait_for(lambda: lines(run.metrics)[-1]["samples"] < BATCH, SECONDS)
        leaving.come_back()
        codes = [machine.wait(SECONDS) for machine in machines.values()]
        assert codes == [0, 0, 0], logs(machines)
        found = lines(run.metrics)
        assert [each["step"] for each in found] == list(range(1, STEPS + 1))
        assert found[-1]["samples"] == BATCH, "it has joined again"
        assert sum("world_size" in each for each in lines(run.attempts)) == 1
        (left,) = [each for each in read_incidents(run) if each.cause == "preempted"]
        assert left.action == "continued"
        assert left.cost["lost_steps"] == 0
        for rank in {0, 1, 2} - {left.evidence["replica"]}:
            started = [each["data"]["pid"] for each in lines(run.events(rank)) if each["kind"] == "start"]
            assert started == [pids[rank]], "the others were not started again"

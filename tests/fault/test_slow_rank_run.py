"""A rank is slow: the doctor names it with a patch, the autopilot deals rows by speed, or leaves its node out."""

from pathlib import Path

import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.diagnosed_runs import findings
from tests.elastic_runs import assert_as_one_size, sizes
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.autopilot import rows_by_speed
from trimaran.core import Decision
from trimaran.doctor import read_evidence
from trimaran.runs import (
    RunDirectory,
    change_answers,
    read_decisions,
    read_left_out,
    read_node_speeds,
    write_change_request,
)

SLEEPING = {"TRIMARAN_TEST_PLUGIN": "tests.fault.sleeping_layers", "TRIMARAN_TEST_ROW_SECONDS": "0.015"}
SETTINGS = ("train.steps=130", "plan.micro_batch=4", "autopilot={mode: act, budget: 0.3}")


def kept(run: RunDirectory) -> list[Decision]:
    return [each for each in read_decisions(run) if each.outcome == "kept"]


def test_a_slow_rank_is_named_and_gets_fewer_rows(tmp_path: Path) -> None:
    """The slow rank sleeps ten times as long for a row, far longer than a busy machine delays the other one."""
    settings = ("train.steps=1000000", "plan.micro_batch=4", "faults.hang_seconds=120")
    extra = SLEEPING | {"TRIMARAN_TEST_ROW_SECONDS": "0.004"}
    with Supervised.start(tmp_path / "run", *settings, extra=extra) as supervised:
        run = supervised.run
        (run.path / "slow-1").write_text("10")
        found = wait_for(lambda: findings(run).get("F005"), pause=2.0)
        assert found.culprit == "rank 1"
        assert found.evidence["kind"] == "hardware"
        assert "as much work as the others" in found.verdict
        assert found.patch == {"plan.micro_batches": "measured"}
        (proposal,) = rows_by_speed(read_evidence(run), {"plan.micro_batches": []})  # the patch of a running run
        assert proposal.reason.startswith("rank 1 computes")
        write_change_request(run, proposal.patch)
        (answer,) = wait_for(lambda: [*change_answers(run)])
        assert answer["data"]["status"] == "applied"
        first, second = run.read_plan().rows_by_rank
        assert first > second, "the slow rank has fewer rows"
        assert first + second == 8, "the global batch is the same"
        supervised.wait_for_step(supervised.step() + 3)
        assert supervised.faults == [], "nothing was restarted"
        run.stop_request.touch()
        assert supervised.wait() == 75
    found_steps = [each["step"] for each in lines(run.metrics)]
    assert found_steps == list(range(1, len(found_steps) + 1))


@pytest.mark.chaos
def test_a_rank_that_becomes_slow_gets_fewer_rows(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", *SETTINGS, extra=SLEEPING) as supervised:
        run = supervised.run
        supervised.wait_for_step(22, 120)
        (run.path / "slow-1").write_text("3")
        assert supervised.wait(400) == 0
    (decision,) = kept(run)
    assert "rank 1 computes" in decision.reason
    assert decision.measured is not None
    assert decision.measured["gain"] > 0.15
    first, second = run.read_plan().rows_by_rank
    assert first > second, "the slow rank has fewer rows"
    assert first + second == 8, "the global batch is the same"
    assert_as_one_size(run, tmp_path / "calm", tolerance=1e-4)


@pytest.mark.chaos
@ROOT_NEEDED
def test_a_node_that_becomes_very_slow_is_left_out_and_the_others_do_its_work(tmp_path: Path) -> None:
    settings = ("train.steps=170", "plan.mesh.dp_replicate=2", "plan.micro_batch=1", "faults.ranks=[1, 2]")
    run = make_run(tmp_path / "run", *settings, "autopilot={mode: act, budget: 0.3, keep: [micro_batch, mesh]}")
    with TwoMachines(run, "--no-check", "--min-nodes", "1", environments=(SLEEPING, SLEEPING)) as machines:
        machines.wait_for_step(22)
        (run.path / "slow-1").write_text("8")
        wait_for(lambda: kept(run), 300)
        assert [machine.wait(400) for machine in machines.all] == [0, 0]
    (decision,) = kept(run)
    (host,) = read_left_out(run)
    assert f"leave {host} out: 1 of 2 ranks go on" in decision.reason
    assert decision.measured is not None
    assert decision.measured["gain"] > 0.3
    assert sizes(run) == [2, 1]
    resumed = [each["data"] for each in lines(run.events(0)) if each["kind"] == "resume"]
    assert [each["tier"] for each in resumed] == ["memory"], "nothing was read from the disk"
    assert_as_one_size(run, tmp_path / "calm", tolerance=1e-4)


@pytest.mark.chaos
@ROOT_NEEDED
def test_a_node_that_was_left_out_is_taken_back_when_it_has_recovered(tmp_path: Path) -> None:
    settings = ("train.steps=400", "plan.mesh.dp_replicate=2", "plan.micro_batch=1", "faults.ranks=[1, 2]")
    run = make_run(tmp_path / "run", *settings, "autopilot={mode: act, budget: 0.3, keep: [micro_batch, mesh]}")
    with TwoMachines(run, "--no-check", "--min-nodes", "1", environments=(SLEEPING, SLEEPING)) as machines:
        machines.wait_for_step(22)
        host = next(each["data"]["host"] for each in lines(run.events(1)) if each["kind"] == "start")
        (run.path / f"slow-{host}").write_text("8")
        wait_for(lambda: kept(run), 300)
        assert read_left_out(run) == {host}
        wait_for(lambda: len(read_node_speeds(run).get(host, ())) >= 2, 120)
        assert sizes(run) == [2, 1], "as slow as it was: nothing is tried"
        (run.path / f"slow-{host}").unlink()
        wait_for(lambda: len(kept(run)) == 2, 400)
        assert [machine.wait(400) for machine in machines.all] == [0, 0]
    left_out, taken_back = kept(run)
    assert left_out.patch == {"nodes.left_out": [host]}
    assert taken_back.patch == {"nodes.left_out": []}
    assert f"{host} computes" in taken_back.reason
    assert taken_back.measured is not None
    assert taken_back.measured["gain"] > 0.1
    assert read_left_out(run) == frozenset()
    assert sizes(run)[:3] == [2, 1, 2]
    assert sizes(run)[-1] == 2
    assert_as_one_size(run, tmp_path / "calm", tolerance=1e-4)

"""A rank that becomes slow in the middle of a run: the autopilot deals rows by speed, or leaves its node out."""

from pathlib import Path

import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.elastic_runs import assert_as_one_size, sizes
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.core import Decision
from trimaran.run import RunDirectory
from trimaran.run.decision_records import read_decisions
from trimaran.run.left_out_nodes import read_left_out
from trimaran.run.node_speeds import read_node_speeds

pytestmark = pytest.mark.slow
SLEEPING = {"TRIMARAN_TEST_PLUGIN": "tests.fault.sleeping_layers", "TRIMARAN_TEST_ROW_SECONDS": "0.015"}
SETTINGS = ("train.steps=130", "plan.micro_batch=4", "autopilot={mode: act, budget: 0.3}")


def kept(run: RunDirectory) -> list[Decision]:
    return [each for each in read_decisions(run) if each.outcome == "kept"]


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

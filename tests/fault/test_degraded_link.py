"""A link between two nodes that degrades in the middle of a run and recovers, and the autopilot that follows it."""

from pathlib import Path

import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.elastic_runs import assert_as_one_size
from tests.fault.harness import lines, wait_for
from trimaran.core import Decision
from trimaran.runs import RunDirectory, read_decisions

pytestmark = [pytest.mark.chaos, ROOT_NEEDED]
SLEEPING = {"TRIMARAN_TEST_PLUGIN": "tests.fault.sleeping_layers", "TRIMARAN_TEST_ROW_SECONDS": "0.012"}
SETTINGS = (
    "model.shape={layers: 3, hidden: 128, heads: 4, kv_heads: 4, ffn: 384}",
    "plan={mesh: {dp_replicate: 2}, grad_accum: 1}",
    "autopilot={mode: act, budget: 0.3}",  # a run of a few minutes: a trial is a large part of it
    "train.steps=170",
)
FAST, SLOW = 300.0, 15.0  # Mbit/s
FEW_STEPS = 22  # under a plan, after which a decision may be near


def kept(run: RunDirectory) -> list[Decision]:
    return [each for each in read_decisions(run) if each.outcome == "kept"]


def test_the_run_changes_its_plan_on_a_slow_link_and_comes_back_when_it_recovers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *SETTINGS)
    with TwoMachines(run, "--no-check", wire=["--rate", str(FAST)], environments=(SLEEPING, SLEEPING)) as machines:
        machines.wait_for_step(FEW_STEPS)
        machines.shape_wire(rate=SLOW)
        wait_for(lambda: kept(run), 300)
        changed = run.read_plan().mesh
        assert changed.dp_replicate == 1, "replicas exchange all gradients"
        machines.shape_wire(rate=FAST)
        assert [machine.wait(400) for machine in machines.all] == [0, 0]
    there, *later = kept(run)
    assert "times as long since step" in there.reason
    assert there.measured is not None
    assert there.measured["gain"] > 0.2
    before, after = (there.baseline[name] for name in ("usual_seconds", "step_seconds"))
    assert after > 2 * before
    # It is back, or where it is now is as fast as it was before.
    mesh, last = run.read_plan().mesh, lines(run.metrics)[-20:]
    assert len(later) <= 2
    is_back = mesh.dp_replicate == 2
    assert is_back or sorted(each["step_seconds"] for each in last)[10] < 1.5 * before
    assert_as_one_size(run, tmp_path / "calm", tolerance=1e-4)  # sums in another order, over all steps

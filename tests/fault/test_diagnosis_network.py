"""The doctor against a run on two machines whose wire is cut, and one of which is lost: F067."""

import os
import shutil
from pathlib import Path

import pytest

from tests.chaos import nodes
from tests.chaos.nodes import Fleet, make_run
from tests.doctoring import findings
from tests.fault.harness import wait_for

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not shutil.which("ip"),
        reason="network namespaces and TUN devices need root",
    ),
]
SETTINGS = ("checkpoint.every=10", "faults.hang_seconds=20")


def test_a_cut_wire_is_found_with_the_machine_that_fell_silent(tmp_path: Path) -> None:
    """While the run stands still, and afterwards, when it has gone on."""
    run = make_run(tmp_path / "run", "train.steps=60", *SETTINGS)
    with Fleet(run, "--node-wait", "60") as fleet:
        fleet.wait_for_step(15)
        assert "F067" not in findings(run), "nothing is wrong yet"
        silent = fleet.other
        fleet.toggle_wire()
        wait_for(lambda: fleet.incidents, 20)
        live = findings(run)["F067"]
        fleet.toggle_wire()
        fleet.wait_for_new_step()
        assert [machine.wait(60) for machine in fleet.machines] == [0, 0]
    after = findings(run)["F067"]
    assert live.culprit == after.culprit == f"{silent.namespace}-{silent.address}"
    assert (live.severity, after.severity) == ("fault", "warning")
    assert "no word over its connection" in after.verdict
    assert 10 < after.step < 60
    assert 5 < after.evidence["cost"]["seconds_to_detect"] < 20
    assert (after.patch, "measures every pair" in after.fix) == ({}, True)  # no setting mends a wire


def test_a_machine_that_is_gone_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with Fleet(run, "--node-wait", "4") as fleet:
        fleet.wait_for_step(15)
        coordinator, gone = fleet.coordinator, fleet.other
        gone.lose()
        assert coordinator.wait(30) == 75
    found = findings(run)["F067"]
    assert found.culprit == f"{gone.namespace}-{gone.address}"
    assert "its supervisor is gone" in found.verdict


def test_a_clock_that_differs_has_lost_nobody(tmp_path: Path) -> None:
    """It is an incident of a machine, which the run goes on with."""
    run = make_run(tmp_path / "run", "train.steps=20", *SETTINGS)
    skewed = {"PYTHONPATH": f"{Path(nodes.__file__).parent / 'skewed'}", "SKEW_SECONDS": "-60"}
    with Fleet(run, environments=[{}, skewed]) as fleet:
        assert [machine.wait(60) for machine in fleet.machines] == [0, 0]
    assert [each.cause for each in fleet.incidents if "clock" in each.what] == ["host"]
    assert "F067" not in findings(run)

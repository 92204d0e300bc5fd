"""The doctor on a run on two nodes, with a cut link or a lost node: F067."""

import os
import shutil
from pathlib import Path

import pytest

from tests.chaos import nodes
from tests.chaos.nodes import TwoMachines, make_run
from tests.diagnosed_runs import findings
from tests.fault.harness import wait_for

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not shutil.which("ip"),
        reason="network namespaces and TUN devices need root",
    ),
]
SETTINGS = ("checkpoint.every=10", "faults.hang_seconds=20")


def test_a_cut_link_is_found_with_the_silent_node(tmp_path: Path) -> None:
    """Both while the run hangs, and after it has continued."""
    run = make_run(tmp_path / "run", "train.steps=60", *SETTINGS)
    with TwoMachines(run, "--node-wait", "60") as machines:
        machines.wait_for_step(15)
        assert "F067" not in findings(run), "nothing is wrong yet"
        silent = machines.other
        machines.toggle_wire()
        wait_for(lambda: machines.incidents, 20)
        live = findings(run)["F067"]
        machines.toggle_wire()
        machines.wait_for_new_step()
        assert [machine.wait(60) for machine in machines.all] == [0, 0]
    after = findings(run)["F067"]
    assert live.culprit == after.culprit == f"{silent.namespace}-{silent.address}"
    assert (live.severity, after.severity) == ("fault", "warning")
    assert "no message over its connection" in after.verdict
    assert 10 < after.step < 60
    assert 5 < after.evidence["cost"]["seconds_to_detect"] < 20
    assert (after.patch, "measures every pair" in after.fix) == ({}, True)  # no setting fixes a cut link


def test_a_lost_node_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=500", *SETTINGS)
    with TwoMachines(run, "--node-wait", "4") as machines:
        machines.wait_for_step(15)
        coordinator, gone = machines.coordinator, machines.other
        gone.lose()
        assert coordinator.wait(30) == 75
    found = findings(run)["F067"]
    assert found.culprit == f"{gone.namespace}-{gone.address}"
    assert "its supervisor is gone" in found.verdict


def test_clock_skew_is_not_a_lost_connection(tmp_path: Path) -> None:
    """It is an incident of a node, but the run continues."""
    run = make_run(tmp_path / "run", "train.steps=20", *SETTINGS)
    skewed = {"PYTHONPATH": f"{Path(nodes.__file__).parent / 'skewed'}", "SKEW_SECONDS": "-60"}
    with TwoMachines(run, environments=[{}, skewed]) as machines:
        assert [machine.wait(60) for machine in machines.all] == [0, 0]
    assert [each.cause for each in machines.incidents if "clock" in each.what] == ["host"]
    assert "F067" not in findings(run)

"""What faults cost with `checkpoint.memory: auto`, beside the bound that the run itself states."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import assert_as_undisturbed, remove_pause, start_run
from tests.fault.harness import Supervised
from trimaran.core import EXIT_DONE, Incident

pytestmark = pytest.mark.chaos


def assert_within_bound(supervised: Supervised, incident: Incident) -> None:
    """Fail if more steps were repeated than the run had stated before the fault."""
    print(f"{incident.id} {incident.what}: {incident.cost}")
    assert incident.cost["lost_steps"] <= incident.cost["max_lost_steps"], incident
    stated = [each["data"]["steps"] for each in supervised.events(0, "loss_bound")]
    assert incident.cost["max_lost_steps"] in stated


def fork_server_of(supervised: Supervised) -> psutil.Process:
    """Return the fork server. Its forks have the same command line, and orphans become children of the supervisor."""
    ranks = {supervised.pid(rank) for rank in range(2)}
    parents = [psutil.Process(rank).parent() for rank in ranks]
    assert parents[0] is not None
    assert parents[0] == parents[1]
    return parents[0]


def test_a_killed_fork_server_costs_no_more_than_the_run_says(tmp_path: Path) -> None:
    """Fault `fork-server-killed`, at two moments of one run."""
    with start_run(tmp_path / "run", "train.steps=200") as supervised:
        for known, step in enumerate((20, 60)):
            supervised.wait_for_step(step)
            fork_server_of(supervised).kill()
            assert_within_bound(supervised, supervised.wait_for_fault(known, 90))
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_a_rank_that_dies_twice_while_the_run_restarts_costs_no_more_than_the_run_says(tmp_path: Path) -> None:
    """Fault `killed-in-restart`: each new process of rank 1 is killed before its first step."""
    with start_run(tmp_path / "run", "train.steps=120", "faults.cycles=5") as supervised:
        supervised.wait_for_step(40)
        supervised.send_signal(1, signal.SIGKILL)
        for restart in (2, 3):
            supervised.wait_for_events(1, "start", restart)
            if not supervised.events(1, "ready")[restart - 1 :]:
                os.kill(supervised.pid(1), signal.SIGKILL)
        for known in range(3):
            assert_within_bound(supervised, supervised.wait_for_fault(known, 90))
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert supervised.attempts() == 4
    assert_as_undisturbed(supervised.run, tmp_path / "calm")

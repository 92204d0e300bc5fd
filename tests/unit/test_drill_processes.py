"""The processes that `trimaran drill` may break: those of a run that runs on this machine."""

import platform
from pathlib import Path

import pytest

from tests.runs import new_run
from trimaran.app import find_processes
from trimaran.core import UserError
from trimaran.runs import AttemptLog, Journal, RunDirectory, take_lease


def recorded_run(path: Path, *, host: str) -> RunDirectory:
    """Return a run of two ranks whose files say that they run on `host`."""
    run = new_run(path)
    AttemptLog(run).begin(world_size=2)
    for rank in range(2):
        with Journal(run, rank) as journal:
            journal.event("start", world_size=2, host=host, pid=2**22 + rank)
    return run


def test_ranks_on_another_machine_are_refused_with_its_name(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", host="node-7")
    with pytest.raises(UserError, match="ssh node-7 trimaran drill") as caught:
        find_processes(run)
    assert caught.value.code == "S031"


def test_a_pid_that_belongs_to_another_process_is_no_rank(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", host=platform.node())
    with take_lease(run):
        assert find_processes(run) is None  # a supervisor is alive, and so starts its ranks again
    with pytest.raises(UserError, match="S030"):
        find_processes(run)

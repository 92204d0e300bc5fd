"""A run on two nodes, which are supervisors of this machine with two addresses: one is silent, returns, and is lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.chaos.nodes import Machine, make_run
from tests.elastic_runs import last_step, sizes
from tests.fault.harness import lines, wait_for
from trimaran.runs import RunDirectory, read_holder, read_incidents

ADDRESSES = ("127.0.0.2", "127.0.0.3")
FLAGS = ("--nodes", "2", "--min-nodes", "1", "--node-wait", "600", "--no-check")


@contextmanager
def two_nodes(run: RunDirectory) -> Iterator[tuple[Machine, Machine]]:
    """Start two nodes; yield the one that coordinates, and the other one."""
    machines = {address: Machine(run, address, FLAGS) for address in ADDRESSES}
    try:
        wait_for(lambda: last_step(run) >= 5)
        holder = read_holder(run)
        assert holder is not None
        first = machines.pop(holder.address.rpartition(":")[0])
        (other,) = machines.values()
        machines[first.address] = first
        yield first, other
    finally:
        for each in machines.values():
            each.lose()


def signal_all(machine: Machine, number: signal.Signals) -> None:
    """Send a signal to every process of a node, its supervisor first."""
    supervisor = psutil.Process(machine.process.pid)
    for each in (supervisor, *supervisor.children(recursive=True)):
        each.send_signal(number)


def wait_for_sizes(run: RunDirectory, *expected: int) -> None:
    """Return when the run has started with each number of ranks, and has made a step with the last one."""
    wait_for(lambda: sizes(run) == [*expected])
    wait_for(lambda: sum(each["kind"] == "ready" for each in lines(run.events(0))) == len(expected))
    before = last_step(run)
    wait_for(lambda: last_step(run) > before)


def test_a_silent_node_is_left_behind_until_it_returns_and_a_lost_one_for_good(tmp_path: Path) -> None:
    settings = ("train.steps=1000000", "checkpoint.memory=1", "faults.hang_seconds=600")
    run = make_run(tmp_path / "run", *settings)
    with two_nodes(run) as (first, other):
        signal_all(other, signal.SIGSTOP)  # as if the network vanished: its connections stay open
        wait_for_sizes(run, 2, 1)
        signal_all(other, signal.SIGCONT)
        wait_for_sizes(run, 2, 1, 2)
        other.lose()
        wait_for_sizes(run, 2, 1, 2, 1)
        run.stop_request.touch()
        assert first.wait(300) == 75
    silent, lost, stopped = [each for each in read_incidents(run) if each.cause in ("network", "host", "preempted")]
    assert (silent.cause, silent.action, lost.cause, lost.action) == ("network", "resized", "host", "resized")
    assert "no message over its connection" in silent.what
    assert "its supervisor is gone" in lost.what
    assert stopped.action == "saved"
    assert other.incidents()[0]["evidence"]["ranks_killed"], "without a coordinator its ranks did not go on"
    assert len(list(run.lease.glob("term-*.json"))) == 1, "the other one never coordinated"
    found = [each["step"] for each in lines(run.metrics)]
    assert found == list(range(1, len(found) + 1))

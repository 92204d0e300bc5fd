"""An elastic run on several nodes that share a disk: it starts with those that were asked for, grows and shrinks."""

import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.nodes import Machine, make_run
from tests.elastic_runs import assert_as_one_size, last_step, remove_pause, sizes
from tests.fault.harness import lines, wait_for
from tests.resume import SavedState
from trimaran.checkpoint import StepFiles, step_path
from trimaran.runs import RunDirectory, read_holder, read_incidents

pytestmark = pytest.mark.chaos
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PAUSE = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_PAUSE": "0.5"}
FLAGS = ("--ranks-per-node", "1", "--no-check")
SECONDS = 120.0  # for a change of the number of ranks, on a busy machine


class ElasticNodes:
    """The nodes of a run by address, each a supervisor of this machine."""

    def __init__(self, run: RunDirectory, *flags: str) -> None:
        self.run, self._flags, self.all = run, [*flags, *FLAGS], dict[str, Machine]()
        self.environment = PAUSE

    def start(self, *addresses: str) -> None:
        for each in addresses:
            self.all[each] = Machine(self.run, each, self._flags, environment=self.environment)

    def wait_for_sizes(self, *expected: int) -> None:
        """Return when the run has started with each number of ranks, and has made a step with the last one."""
        try:
            wait_for(lambda: sizes(self.run) == [*expected], SECONDS)
            ready = len(expected)
            wait_for(lambda: self._num_ready() == ready, SECONDS)
            before = last_step(self.run)
            wait_for(lambda: last_step(self.run) > before, SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{sizes(self.run)} at step {last_step(self.run)}\n{self.logs()}") from error

    def _num_ready(self) -> int:
        return sum(each["kind"] == "ready" for each in lines(self.run.events(0)))

    def coordinator(self) -> str:
        holder = read_holder(self.run)
        assert holder is not None
        return holder.address.rpartition(":")[0]

    def others(self) -> list[str]:
        """Return the addresses of the nodes that follow, without those that have ended."""
        running = [address for address, machine in self.all.items() if machine.process.poll() is None]
        return [address for address in running if address != self.coordinator()]

    def codes(self, *addresses: str) -> list[int]:
        return [self.all[address].wait(SECONDS) for address in addresses]

    def logs(self) -> str:
        return "\n".join(f"--- {each.address}\n{each.log.read_text()[-6000:]}" for each in self.all.values())


@contextmanager
def elastic_nodes(run: RunDirectory, *flags: str) -> Iterator[ElasticNodes]:
    nodes = ElasticNodes(run, *flags)
    try:
        yield nodes
    finally:
        for machine in nodes.all.values():
            machine.lose()


def test_a_run_starts_with_the_nodes_asked_for_and_follows_those_that_come_and_go(tmp_path: Path) -> None:
    settings = ("faults.ranks=[1, 3]", "train.global_batch=6", "train.steps=200", "checkpoint.every=20")
    run = make_run(tmp_path / "run", *settings)  # planned for two nodes
    flags = (
        "--nodes",
        "3",
        "--start-nodes",
        "2",
        "--min-nodes",
        "1",
        "--node-wait",
        "100000",
    )  # it does not wait for the third
    with elastic_nodes(run, *flags) as nodes:
        nodes.start(*ADDRESSES[:2])
        nodes.wait_for_sizes(2)
        nodes.start(ADDRESSES[2])
        nodes.wait_for_sizes(2, 3)
        lost = nodes.others()[-1]
        for expected in ([2, 3, 2], [2, 3, 2, 3, 2]):  # more than once
            nodes.all[lost].lose()
            nodes.wait_for_sizes(*expected)
            nodes.start(lost)
            nodes.wait_for_sizes(*expected, 3)
        leaves = nodes.others()[0]
        nodes.all[leaves].process.send_signal(signal.SIGTERM)  # preempted: it saves and leaves
        nodes.wait_for_sizes(2, 3, 2, 3, 2, 3, 2)
        assert nodes.codes(leaves) == [75]
        remove_pause(run)
        assert nodes.codes(*(address for address in ADDRESSES if address != leaves)) == [0, 0], nodes.logs()
    found = [(each.cause, each.action) for each in read_incidents(run) if each.cause in ("host", "preempted")]
    assert found == [("host", "resized"), ("host", "resized"), ("preempted", "resized")]
    assert read_incidents(run)[-1].cost["lost_steps"] == 0
    assert_as_one_size(run, tmp_path / "calm")


def test_when_the_node_that_coordinates_leaves_another_one_takes_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "faults.ranks=[1, 2]", "train.steps=120", "checkpoint.every=20")
    with elastic_nodes(run, "--nodes", "2", "--min-nodes", "1") as nodes:
        nodes.start(*ADDRESSES[:2])
        nodes.wait_for_sizes(2)
        first, (second,) = nodes.coordinator(), nodes.others()
        nodes.all[first].process.send_signal(signal.SIGTERM)
        assert nodes.codes(first) == [75]
        nodes.wait_for_sizes(2, 1)
        assert nodes.coordinator() == second
        nodes.start(first)
        nodes.wait_for_sizes(2, 1, 2)
        remove_pause(run)
        assert nodes.codes(first, second) == [0, 0], nodes.logs()
    actions = [(each.cause, each.action) for each in read_incidents(run) if each.cause in ("host", "preempted")]
    assert actions == [("preempted", "continued"), ("host", "resized")]
    assert_as_one_size(run, tmp_path / "calm")


def test_a_run_that_became_smaller_starts_again_with_all_nodes_and_ends_when_all_are_asked_to_stop(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", "faults.ranks=[1, 2]", "train.steps=120", "checkpoint.every=20")
    with elastic_nodes(run, "--nodes", "2", "--min-nodes", "1") as nodes:
        nodes.start(*ADDRESSES[:2])
        nodes.wait_for_sizes(2)
        nodes.all[nodes.others()[0]].lose()
        nodes.wait_for_sizes(2, 1)
        left = nodes.coordinator()
        nodes.all[left].process.send_signal(signal.SIGTERM)
        assert nodes.codes(left) == [75], nodes.logs()
        nodes.start(*ADDRESSES[:2])
        nodes.wait_for_sizes(2, 1, 2)
        for machine in nodes.all.values():
            machine.process.send_signal(signal.SIGTERM)
        assert nodes.codes(*ADDRESSES[:2]) == [75, 75], nodes.logs()
        assert [each["over"] for each in lines(run.attempts) if "over" in each] == [75, 75]
        assert read_incidents(run)[-1].action == "saved"
        assert sizes(run) == [2, 1, 2], "no node went on alone"
        remove_pause(run)
        nodes.start(*ADDRESSES[:2])
        assert nodes.codes(*ADDRESSES[:2]) == [0, 0], nodes.logs()
    assert sizes(run) == [2, 1, 2, 2]
    assert_as_one_size(run, tmp_path / "calm")


def restored(run: RunDirectory, *, attempt: int, world_size: int) -> SavedState:
    """Return the state that the ranks of an attempt have restored at its start, see `record_restored`."""
    files = [run.path / f"restored-{attempt}-{rank}" for rank in range(world_size)]
    rows = [pickle.loads(file.read_bytes()) for file in files]
    step, _, progress = rows[0]
    assert all((each[0], each[2]) == (step, progress) for each in rows), "ranks differ in their progress"
    return SavedState(step, [shares for _, shares, _ in rows], progress)


@pytest.mark.parametrize(
    ("planned", "axis"),
    [
        (("plan.mesh.tp=2",), "tp"),
        (("plan.mesh.dp_shard=2", "plan.sharding=parameters"), "dp_shard"),
        (("plan.mesh.pp=2",), "pp"),
    ],
    ids=["tensors", "shards", "stages"],
)
def test_a_run_that_grows_gets_another_layout_and_the_same_state(
    tmp_path: Path, planned: tuple[str, ...], axis: str
) -> None:
    settings = ("faults.ranks=[1, 2]", "train.steps=60", "checkpoint.every=20", "checkpoint.keep_every=1")
    run = make_run(tmp_path / "run", *settings, *planned)  # planned for two nodes
    with elastic_nodes(run, "--nodes", "2", "--start-nodes", "1", "--min-nodes", "1") as nodes:
        nodes.environment = PAUSE | {"TRIMARAN_TEST_PLUGIN": "tests.fault.record_restored"}
        nodes.start(ADDRESSES[0])
        nodes.wait_for_sizes(1)
        assert getattr(run.read_plan().mesh, axis) == 1
        nodes.start(ADDRESSES[1])
        nodes.wait_for_sizes(1, 2)
        assert getattr(run.read_plan().mesh, axis) == 2, "the plan is another one"
        remove_pause(run)
        assert nodes.codes(*ADDRESSES[:2]) == [0, 0], nodes.logs()
    state = restored(run, attempt=1, world_size=2)
    saved = StepFiles(step_path(run.checkpoints, state.step))  # by the one rank, when it stopped
    assert saved.manifest.world_size == 1
    assert saved.index.keys() == state.index.keys()
    for key, entry in saved.index.items():
        (whole,) = entry.regions
        ours = state.full_tensor(key).numpy().tobytes()
        assert ours == saved.bytes_of(entry.meta, whole).tobytes(), key
    assert any(key.startswith("optimizer/") for key in saved.index)
    assert {name: saved.manifest.progress[name] for name in state.progress} == state.progress
    assert_as_one_size(run, tmp_path / "calm")  # every step once, with its samples and its loss

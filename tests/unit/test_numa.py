"""Ranks are bound to the cores near their GPU, and nodes of one switch are neighbours."""

import os
import random
import threading
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from trimaran.launch import order_nodes, read_switches
from trimaran.machine import cores_near, numa_nodes, pci_device
from trimaran.train import bind_near

BUS = "0000:41:00.0"


def machine(sys: Path, nodes: list[str], gpu_node: int) -> Path:
    """Make the files of sysfs for these core lists and one GPU; return the GPU's folder."""
    for number, cores in enumerate(nodes):
        folder = sys / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    gpu = pci_device(f"0000{BUS}", sys)
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{gpu_node}\n")
    return gpu


def test_the_cores_of_the_gpus_node_are_chosen(tmp_path: Path) -> None:
    gpu = machine(tmp_path, ["0-3,8-11", "4-7,12-15"], 1)
    assert gpu.name == BUS
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert cores_near(gpu, set(range(16)), tmp_path) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_near(gpu, {0, 1, 4, 5}, tmp_path) == {4, 5}, "never more cores than allowed"


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "allowed"),
    [
        (["0-7"], 0, set(range(8))),  # one node
        (["0-3", "4-7"], 1, {0, 1}),  # bound already
        (["0-3", "4-7"], -1, set(range(8))),  # the node of the GPU is not known
        (["0-3", "4-7", "8-11"], 2, set(range(8))),  # no core of the GPU's node may be used
        ([], 0, set(range(8))),
    ],
    ids=["one-node", "bound", "unknown", "not-allowed", "no-nodes"],
)
def test_without_a_choice_nothing_is_bound(tmp_path: Path, nodes: list[str], gpu_node: int, allowed: set[int]) -> None:
    assert cores_near(machine(tmp_path, nodes, gpu_node), allowed, tmp_path) == frozenset()


def bind_here(sys: Path, gpu: Path) -> tuple[dict[str, int], list[set[int]]]:
    """Bind this process while it has a second thread; return the cores of the process, that thread and a new one."""
    found, may_end = [], threading.Event()
    other = threading.Thread(target=lambda: (may_end.wait(), found.append(os.sched_getaffinity(0))))
    other.start()
    bound = bind_near(gpu, sys=sys)
    may_end.set()
    other.join()
    later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    later.start()
    later.join()
    return bound, [os.sched_getaffinity(0), *found]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_every_thread_of_a_process_is_bound(tmp_path: Path) -> None:
    one, *others = sorted(os.sched_getaffinity(0))
    gpu = machine(tmp_path, [",".join(map(str, others)), str(one)], 1)
    [(bound, cores)] = run_ranks(1, bind_here, tmp_path, gpu)
    assert bound == {"numa_node": 1, "cores": 1}
    assert cores == [{one}] * 3


def test_slurm_and_the_user_name_the_switches() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "spine1.leaf3.node17", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert read_switches(slurm) == ("spine1", "leaf3")
    assert read_switches(slurm | {"TRIMARAN_TOPOLOGY": "hall2.row4"}) == ("hall2", "row4")
    assert read_switches({"SLURM_TOPOLOGY_ADDR": "node17", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ()
    assert read_switches({}) == ()


def test_nodes_of_one_switch_are_neighbours() -> None:
    places = {f"node{number:02}": ("spine", f"leaf{number % 3}") for number in range(12)}
    names = [*places]
    random.Random(0).shuffle(names)
    order = order_nodes({name: places[name] for name in names})
    assert [places[name][1] for name in order] == ["leaf0"] * 4 + ["leaf1"] * 4 + ["leaf2"] * 4
    assert order[:4] == ["node00", "node03", "node06", "node09"]
    from_head = order_nodes(places, first="node05")
    assert from_head[0] == "node05"
    assert [places[name][1] for name in from_head] == ["leaf2"] * 4 + ["leaf0"] * 4 + ["leaf1"] * 4
    assert order_nodes({"b": (), "a": ()}) == ["a", "b"]
    assert order_nodes({"a": (), "b": ()}, first="b") == ["b", "a"]

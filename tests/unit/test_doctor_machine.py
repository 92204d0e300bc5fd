"""How a machine becomes facts: the driver's tools, Linux's files, limits and disks; and nodes in pairs."""

import os
import resource
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trimaran.core import UserError
from trimaran.doctor.checks.pairs import check, culprits, first_round, second_round
from trimaran.doctor.machine_facts import Ecc, Facts, Gpu, GpuClocks, HostFacts, NodeMeasurements, Pair, Versions
from trimaran.doctor.measure_machine import NodeMeeting
from trimaran.doctor.nvidia_smi import parse_peers, parse_quick, parse_ways_to_nics, parse_whole
from trimaran.doctor.read_machine import is_taken, read_disk, read_facts, read_nics, read_quota, read_wiring, visible
from trimaran.hardware.gpu_topology import parse_topology

MACHINES = Path(__file__).parent / "machines"


def test_the_whole_answer_of_the_drivers_tool_is_read() -> None:
    gpus, driver = parse_whole((MACHINES / "smi-sick.xml").read_text())
    first, second, third, fourth = gpus
    assert driver == "570.133.20"
    assert (first.name, first.uuid, first.bus) == ("NVIDIA H100 80GB HBM3", "GPU-11111111-aaaa", "00000000:19:00.0")
    assert (first.memory, third.used) == (81559 * 2**20, 40960 * 2**20)
    assert first.ecc is not None
    assert (first.ecc.uncorrected, first.ecc.is_pending, first.ecc.is_worn) == (2, True, False)  # not the aggregate's 7
    assert second.pace is not None
    assert second.pace.brakes == ("hw_thermal_slowdown",)
    assert first.pace is not None
    assert first.pace.brakes == ()  # idle is no brake
    assert third.pace is not None
    assert (third.pace.power_limit, third.pace.clock, third.pace.pcie_width) == (500.0, 1200.0, 8)
    assert fourth.pace is not None
    assert fourth.pace.brakes == ("hw_power_brake_slowdown",)  # an older driver's word for it
    assert [gpu.reset_required for gpu in gpus] == [False, False, False, True]


def test_what_a_real_h200_answers_is_read_to_the_last_number() -> None:
    (gpu,), driver = parse_whole((MACHINES / "smi-h200.xml").read_text())
    assert (driver, gpu.name, gpu.bus) == ("580.159.04", "NVIDIA H200", "00000000:0A:00.0")
    assert (gpu.memory, gpu.used, gpu.compute_mode, gpu.mig) == (143771 * 2**20, 0, "Default", "Disabled")
    assert gpu.ecc == Ecc(enabled=True)
    assert gpu.pace == GpuClocks(
        brakes=(),
        power_limit=700.0,
        default_power_limit=700.0,
        clock=1980.0,
        default_clock=1980.0,
        pcie_width=16,
        max_pcie_width=16,
        temperature=42.0,
    )
    (short,), same = parse_quick((MACHINES / "smi-h200.csv").read_text())
    assert (same, short) == (driver, replace(gpu, ecc=None, pace=None, mig=""))
    topology = (MACHINES / "topo-h200.txt").read_text()
    assert "\x1b[4m" in topology
    assert parse_topology(topology) == parse_peers((MACHINES / "p2p-h200.txt").read_text()) == [["X"]]
    assert parse_ways_to_nics(topology) == []


@pytest.mark.parametrize(
    ("told", "says", "field"),
    [
        ("<gpu_recovery_action>None<", "<gpu_recovery_action>Reset<", "reset_required"),
        ("<tpc_repair_pending>No<", "<tpc_repair_pending>Yes<", "is_pending"),
        ("<unrepairable_memory>No<", "<unrepairable_memory>Yes<", "is_worn"),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>5<", "uncorrected"),
    ],
)
def test_trouble_that_a_new_driver_tells_of_is_understood(told: str, says: str, field: str) -> None:
    text = (MACHINES / "smi-h200.xml").read_text()
    assert told in text
    (well,), _ = parse_whole(text)
    (sick,), _ = parse_whole(text.replace(told, says))
    assert well.ecc is not None
    assert sick.ecc is not None
    before, after = (asdict(each) | asdict(each.ecc) for each in (well, sick))  # type: ignore[arg-type]
    assert {name for name in before if name != "ecc" and before[name] != after[name]} == {field}


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "<nvidia_smi_log>", "<a/>"]
)
def test_an_answer_that_is_none_shows_no_gpus(text: str) -> None:
    assert parse_whole(text)[0] == ()
    assert parse_quick(text) == ((), "")
    assert parse_peers(text) == []
    assert parse_ways_to_nics(text) == []


def test_the_quick_answer_about_two_gpus_is_read_also_where_a_number_is_missing() -> None:
    first = (MACHINES / "smi-h200.csv").read_text()
    gpus, driver = parse_quick(f"{first}1, NVIDIA H200, GPU-2, x, [N/A], 12, 580, Default\n")
    assert (driver, gpus[0].memory, gpus[1].memory, gpus[1].used) == ("580.159.04", 143771 * 2**20, 0, 12 * 2**20)


def test_ways_between_gpus_and_cards_are_read() -> None:
    text = (MACHINES / "topo-h100.txt").read_text()
    matrix, ways = parse_topology(text), parse_ways_to_nics(text)
    assert matrix is not None
    assert {way for row in matrix for way in row} == {"X", "NV18"}
    assert [len(row) for row in ways] == [9] * 8
    assert ways[3] == ["SYS", "SYS", "SYS", "NODE", "PIX", "SYS", "SYS", "SYS", "SYS"]


def test_peers_are_read() -> None:
    text = (MACHINES / "p2p-geforce.txt").read_text()
    assert parse_peers(text) == [["X", "CNS", "OK"], ["CNS", "X", "CNS"], ["OK", "CNS", "X"]]


def test_gpus_that_are_hidden_are_not_looked_at() -> None:
    gpus = tuple(Gpu(index=each, name="H100", uuid=f"GPU-{each}abc") for each in range(4))
    assert [gpu.index for gpu in visible(gpus, "2,0")] == [2, 0]
    assert [gpu.index for gpu in visible(gpus, "GPU-3ab")] == [3]
    assert visible(gpus, "") == ()
    assert [gpu.index for gpu in visible(gpus, "1,9,2")] == [1]
    assert visible(gpus, None) == gpus


def file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cards_and_their_places_are_read_from_linux(tmp_path: Path) -> None:
    card = tmp_path / "class/infiniband/mlx5_0"
    file(card / "ports/1/state", "4: ACTIVE\n")
    file(card / "ports/1/rate", "400 Gb/sec (4X NDR)\n")
    file(card / "device/numa_node", "1\n")
    file(tmp_path / "class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    file(tmp_path / "class/net/eth0/device/numa_node", "-1\n")
    file(tmp_path / "class/net/eth0/operstate", "up\n")
    file(tmp_path / "class/net/eth0/speed", "25000\n")
    file(tmp_path / "class/net/lo/operstate", "unknown\n")
    first, second, ethernet = read_nics(tmp_path)
    assert (first.name, first.is_up, first.gigabits, first.numa) == ("mlx5_0", True, 400.0, 1)
    assert (second.name, second.is_up) == ("mlx5_1", False)
    assert (ethernet.name, ethernet.gigabits, ethernet.numa) == ("eth0", 25.0, -1)
    file(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    file(tmp_path / "devices/system/node/node0/cpulist", "0-4095\n")
    wiring = read_wiring((Gpu(index=0, name="", bus="00000000:3B:00.0"),), links=False, sys=tmp_path)
    assert (wiring.gpu_numa, wiring.own_numa, wiring.interfaces) == ((1,), {0}, {"eth0", "lo"})


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_the_quota_of_a_container_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    file(tmp_path / "cpu.max", text)
    assert read_quota(tmp_path) == cores


def test_this_machine_is_read_without_trouble() -> None:
    facts = read_facts(dict(os.environ), quick=True)
    assert facts.versions.torch
    assert facts.host.loopback == ""
    assert facts.host.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.wiring is not None
    assert "lo" in facts.wiring.interfaces


def test_a_disk_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    found = read_disk(tmp_path / "not" / "yet", measure=True)
    assert found.path == tmp_path
    assert found.bandwidth is not None
    assert found.bandwidth > 1e5
    assert list(tmp_path.iterdir()) == []
    assert read_disk(Path("/proc/1"), measure=True).trouble


def test_a_port_that_somebody_listens_at_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_taken("127.0.0.1", port)
    assert not is_taken("127.0.0.1", port)


def measured(pairs: list[Pair], seconds: Callable[[int, int], float | None]) -> dict[Pair, float | None]:
    return {pair: seconds(*pair) for pair in pairs}


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 7, 8, 33])
@pytest.mark.parametrize("slow", [4.0, None])
def test_two_rounds_of_pairs_find_the_bad_node(nodes: int, slow: float | None) -> None:
    for bad in range(nodes):

        def seconds(a: int, b: int, bad: int = bad) -> float | None:
            return slow if bad in (a, b) else 1.0 + 0.01 * (a + b) / nodes

        first = measured(first_round(nodes), seconds)
        second = measured(second_round(nodes, first), seconds)
        assert culprits(first, second) == {bad}


def test_two_bad_nodes_are_both_found_and_one_bad_link_is_nobodys_fault() -> None:
    def two(a: int, b: int) -> float | None:
        return 9.0 if {2, 7} & {a, b} else 1.0

    first = measured(first_round(8), two)
    assert culprits(first, measured(second_round(8, first), two)) == {2, 7}
    first = measured(first_round(8), lambda a, b: 9.0 if (a, b) == (0, 1) else 1.0)
    second = measured(second_round(8, first), lambda a, b: 1.0)
    assert culprits(first, second) == set()
    facts = Facts(environment={}, versions=Versions(), host=HostFacts(cores=1, memory_free=0))
    names = tuple(f"n{node}" for node in range(8))
    found = check(replace(facts, fleet=NodeMeasurements(names=names, rounds=(first, second))))
    assert (found.status, found.what) == ("warn", "n0 and n1 were slow together, and both well with others")


def test_a_partner_that_was_interrupted_is_not_blamed_beside_a_bad_node() -> None:
    first = {(0, 1): 1.0, (2, 3): 60.0}
    second = {(2, 0): 61.0, (3, 1): 2.0}
    assert culprits(first, second) == {2}


def test_every_node_is_measured_and_nobody_meets_itself() -> None:
    for nodes in range(2, 40):
        first = measured(first_round(nodes), lambda a, b: 1.0)
        both = [*first, *second_round(nodes, first)]
        assert {node for pair in both for node in pair} == set(range(nodes))
        assert all(left != right for left, right in both)


def test_nodes_that_are_all_silent_are_not_blamed_one_by_one() -> None:
    facts = Facts(environment={}, versions=Versions(), host=HostFacts(cores=1, memory_free=0))
    fleet = NodeMeasurements(names=("a", "b"), rounds=({(0, 1): None}, {(0, 1): None}))
    assert check(replace(facts, fleet=fleet)).what == "no two nodes could exchange anything"


@pytest.mark.parametrize(
    ("nodes", "node", "address"), [(1, 0, "a:1"), (2, 2, "a:1"), (2, 0, ""), (2, 0, "host"), (2, 0, "host:99999")]
)
def test_flags_that_do_not_fit_together_are_refused(nodes: int, node: int, address: str) -> None:
    with pytest.raises(UserError, match="H020"):
        NodeMeeting(nodes=nodes, node=node, address=address)

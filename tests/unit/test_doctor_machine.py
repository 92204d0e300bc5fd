"""Reading a machine: nvidia-smi, /sys, limits and disks; and finding bad nodes from pair measurements."""

import os
import resource
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trimaran.core import Bytes, UserError
from trimaran.machine import (
    Ecc,
    Facts,
    Gpu,
    GpuClocks,
    HostFacts,
    NodeMeasurements,
    Pair,
    RendezvousOptions,
    Versions,
    cpu_quota,
    culprits,
    first_round,
    is_port_in_use,
    node_pairs,
    parse_full_query,
    parse_gpu_nic_paths,
    parse_peers,
    parse_short_query,
    parse_topology,
    read_disk,
    read_facts,
    read_interconnect,
    read_nics,
    second_round,
    visible,
)

MACHINES = Path(__file__).parent / "machines"


def test_the_full_nvidia_smi_query_is_parsed() -> None:
    gpus, driver = parse_full_query((MACHINES / "smi-faulty.xml").read_text())
    first, second, third, fourth = gpus
    assert driver == "570.133.20"
    assert (first.name, first.uuid, first.bus) == ("NVIDIA H100 80GB HBM3", "GPU-11111111-aaaa", "00000000:19:00.0")
    assert (first.memory, third.used) == (81559 * 2**20, 40960 * 2**20)
    assert first.ecc is not None
    assert first.ecc.uncorrected == 2  # not the aggregate's 7
    assert (first.ecc.reset_pending, first.ecc.spare_rows_exhausted) == (True, False)
    assert second.clocks is not None
    assert second.clocks.throttle_reasons == ("hw_thermal_slowdown",)
    assert first.clocks is not None
    assert first.clocks.throttle_reasons == ()  # idle is not throttling
    assert third.clocks is not None
    assert (third.clocks.power_limit, third.clocks.clock, third.clocks.pcie_width) == (500.0, 1200.0, 8)
    assert fourth.clocks is not None
    assert fourth.clocks.throttle_reasons == ("hw_power_brake_slowdown",)  # an older driver's name for it
    assert [gpu.reset_required for gpu in gpus] == [False, False, False, True]


def test_the_output_of_a_real_h200_is_parsed_completely() -> None:
    (gpu,), driver = parse_full_query((MACHINES / "smi-h200.xml").read_text())
    assert (driver, gpu.name, gpu.bus) == ("580.159.04", "NVIDIA H200", "00000000:0A:00.0")
    assert (gpu.memory, gpu.used, gpu.compute_mode, gpu.mig) == (143771 * 2**20, 0, "Default", "Disabled")
    assert gpu.ecc == Ecc(enabled=True)
    assert gpu.clocks == GpuClocks(
        throttle_reasons=(),
        power_limit=700.0,
        default_power_limit=700.0,
        clock=1980.0,
        default_clock=1980.0,
        pcie_width=16,
        max_pcie_width=16,
        temperature=42.0,
    )
    (short,), same = parse_short_query((MACHINES / "smi-h200.csv").read_text())
    assert (same, short) == (driver, replace(gpu, ecc=None, clocks=None, mig=""))
    topology = (MACHINES / "topo-h200.txt").read_text()
    assert "\x1b[4m" in topology
    assert parse_topology(topology) == parse_peers((MACHINES / "p2p-h200.txt").read_text()) == [["X"]]
    assert parse_gpu_nic_paths(topology) == []


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("<gpu_recovery_action>None<", "<gpu_recovery_action>Reset<", "reset_required"),
        ("<tpc_repair_pending>No<", "<tpc_repair_pending>Yes<", "reset_pending"),
        ("<unrepairable_memory>No<", "<unrepairable_memory>Yes<", "spare_rows_exhausted"),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>5<", "uncorrected"),
    ],
)
def test_problems_that_a_new_driver_reports_are_parsed(old: str, new: str, field: str) -> None:
    text = (MACHINES / "smi-h200.xml").read_text()
    assert old in text
    (good,), _ = parse_full_query(text)
    (faulty,), _ = parse_full_query(text.replace(old, new))
    assert good.ecc is not None
    assert faulty.ecc is not None
    before, after = (asdict(each) | asdict(each.ecc) for each in (good, faulty))  # type: ignore[arg-type]
    assert {name for name in before if name != "ecc" and before[name] != after[name]} == {field}


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "<nvidia_smi_log>", "<a/>"]
)
def test_unparsable_output_gives_no_gpus(text: str) -> None:
    assert parse_full_query(text)[0] == ()
    assert parse_short_query(text) == ((), "")
    assert parse_peers(text) == []
    assert parse_gpu_nic_paths(text) == []


def test_the_short_query_is_parsed_with_a_missing_number() -> None:
    first = (MACHINES / "smi-h200.csv").read_text()
    gpus, driver = parse_short_query(f"{first}1, NVIDIA H200, GPU-2, x, [N/A], 12, 580, Default\n")
    assert (driver, gpus[0].memory, gpus[1].memory, gpus[1].used) == ("580.159.04", 143771 * 2**20, 0, 12 * 2**20)


def test_paths_between_gpus_and_network_cards_are_parsed() -> None:
    text = (MACHINES / "topo-h100.txt").read_text()
    matrix, paths = parse_topology(text), parse_gpu_nic_paths(text)
    assert matrix is not None
    assert {kind for row in matrix for kind in row} == {"X", "NV18"}
    assert [len(row) for row in paths] == [9] * 8
    assert paths[3] == ["SYS", "SYS", "SYS", "NODE", "PIX", "SYS", "SYS", "SYS", "SYS"]


def test_the_peer_matrix_is_parsed() -> None:
    text = (MACHINES / "p2p-geforce.txt").read_text()
    assert parse_peers(text) == [["X", "CNS", "OK"], ["CNS", "X", "CNS"], ["OK", "CNS", "X"]]


def test_only_visible_gpus_are_returned() -> None:
    gpus = tuple(Gpu(index=each, name="H100", uuid=f"GPU-{each}abc") for each in range(4))
    assert [gpu.index for gpu in visible(gpus, "2,0")] == [2, 0]
    assert [gpu.index for gpu in visible(gpus, "GPU-3ab")] == [3]
    assert visible(gpus, "") == ()
    assert [gpu.index for gpu in visible(gpus, "1,9,2")] == [1]
    assert visible(gpus, None) == gpus


def file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_network_cards_and_numa_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
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
    interconnect = read_interconnect((Gpu(index=0, name="", bus="00000000:3B:00.0"),), links=False, sys=tmp_path)
    assert (interconnect.gpu_numa, interconnect.allowed_numa, interconnect.interfaces) == ((1,), {0}, {"eth0", "lo"})


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_the_cpu_quota_of_a_container_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    file(tmp_path / "cpu.max", text)
    assert cpu_quota(tmp_path) == cores


def test_this_machine_can_be_read() -> None:
    facts = read_facts(dict(os.environ), quick=True)
    assert facts.versions.torch
    assert facts.host.loopback == ""
    assert facts.host.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.interconnect is not None
    assert "lo" in facts.interconnect.interfaces


def test_measuring_a_disk_leaves_no_files(tmp_path: Path) -> None:
    found = read_disk(tmp_path / "not" / "yet", measure=True)
    assert found.path == tmp_path
    assert found.bandwidth is not None
    assert found.bandwidth > 1e5
    assert list(tmp_path.iterdir()) == []
    assert read_disk(Path("/proc/1"), measure=True).write_error


def test_a_port_with_a_listener_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_port_in_use("127.0.0.1", port)
    assert not is_port_in_use("127.0.0.1", port)


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


def test_two_bad_nodes_are_found_and_a_bad_link_blames_no_node() -> None:
    def two(a: int, b: int) -> float | None:
        return 9.0 if {2, 7} & {a, b} else 1.0

    first = measured(first_round(8), two)
    assert culprits(first, measured(second_round(8, first), two)) == {2, 7}
    first = measured(first_round(8), lambda a, b: 9.0 if (a, b) == (0, 1) else 1.0)
    second = measured(second_round(8, first), lambda a, b: 1.0)
    assert culprits(first, second) == set()
    facts = Facts(environment={}, versions=Versions(), host=HostFacts(cores=1, memory_free=Bytes(0)))
    names = tuple(f"n{node}" for node in range(8))
    found = node_pairs(replace(facts, node_measurements=NodeMeasurements(names=names, rounds=(first, second))))
    assert (found.status, found.what) == ("warn", "n0 and n1 were slow together, but fast with other nodes")


def test_an_interrupted_partner_of_a_bad_node_is_not_blamed() -> None:
    first = {(0, 1): 1.0, (2, 3): 60.0}
    second = {(2, 0): 61.0, (3, 1): 2.0}
    assert culprits(first, second) == {2}


def test_every_node_is_measured_and_never_with_itself() -> None:
    for nodes in range(2, 40):
        first = measured(first_round(nodes), lambda a, b: 1.0)
        both = [*first, *second_round(nodes, first)]
        assert {node for pair in both for node in pair} == set(range(nodes))
        assert all(left != right for left, right in both)


def test_if_all_nodes_are_silent_none_is_blamed() -> None:
    facts = Facts(environment={}, versions=Versions(), host=HostFacts(cores=1, memory_free=Bytes(0)))
    silent = NodeMeasurements(names=("a", "b"), rounds=({(0, 1): None}, {(0, 1): None}))
    assert node_pairs(replace(facts, node_measurements=silent)).what == "no two nodes could exchange a message"


@pytest.mark.parametrize(
    ("nodes", "node", "address"), [(1, 0, "a:1"), (2, 2, "a:1"), (2, 0, ""), (2, 0, "host"), (2, 0, "host:99999")]
)
def test_inconsistent_node_options_are_refused(nodes: int, node: int, address: str) -> None:
    with pytest.raises(UserError, match="H020"):
        RendezvousOptions(nodes=nodes, node=node, address=address)

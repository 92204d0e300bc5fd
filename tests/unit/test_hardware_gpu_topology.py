"""Links between GPUs from nvidia-smi, and network bandwidth from sysfs."""

from pathlib import Path

import pytest

from trimaran.machine import DEVICES, Cluster, gpu_links, parse_topology, read_network

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def topology_text(rows: list[str], *, header: str = "", tail: str = "0-47\t0\t\tN/A") -> str:
    """Return what `nvidia-smi topo -m` prints for these rows of the matrix."""
    names = [f"GPU{place}" for place in range(len(rows))]
    lines = [f"{name}\t{row}\t{tail}" for name, row in zip(names, map("\t".join, map(str.split, rows)), strict=True)]
    return "\n".join(
        [header or "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\x1b[0m", *lines, LEGEND]
    )


def all_pairs(num_gpus: int, kind: str) -> list[str]:
    return [" ".join("X" if row == column else kind for column in range(num_gpus)) for row in range(num_gpus)]


DGX1 = [
    "X   NV1 NV1 NV2 NV2 SYS SYS SYS",
    "NV1 X   NV2 NV1 SYS NV2 SYS SYS",
    "NV1 NV2 X   NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X   SYS SYS SYS NV1",
    "NV2 SYS SYS SYS X   NV1 NV1 NV2",
    "SYS NV2 SYS SYS NV1 X   NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X   NV2",
    "SYS SYS SYS NV1 NV2 NV1 NV2 X",
]
PAIRS = ["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"]
CROSSED_PAIRS = ["X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X"]
TWO_SOCKETS = ["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X NODE", "SYS SYS NODE X"]


@pytest.mark.parametrize(
    ("name", "rows", "links"),
    [
        ("H100", all_pairs(8, "NV18"), [("NVLink", 8, 450e9)]),
        ("A100-40GB", all_pairs(8, "NV12"), [("NVLink", 8, 300e9)]),
        ("B200", all_pairs(8, "NV18"), [("NVLink", 8, 900e9)]),
        ("H100", all_pairs(4, "NV6"), [("NVLink", 4, 450e9)]),
        ("V100-16GB", DGX1, [("NVLink", 8, 150e9)]),
        ("RTX4090", all_pairs(4, "PHB"), [("PCIe", 4, 31e9)]),
        ("RTX4090", TWO_SOCKETS, [("PCIe", 2, 31e9), ("sockets", 4, 20.8e9)]),
        ("RTX-A6000", PAIRS, [("NVLink", 2, 56e9), ("sockets", 4, 20.8e9)]),
        ("RTX-A6000", CROSSED_PAIRS, [("sockets", 4, 20.8e9)]),
        ("A100-PCIe-80GB", ["X NV12 NODE NODE", "NV12 X NODE NODE", "NODE NODE X NV12", "NODE NODE NV12 X"],
         [("NVLink", 2, 300e9), ("PCIe", 4, 31e9)]),
        ("H200", ["X"], []),
    ],
)  # fmt: skip
def test_a_topology_becomes_links(name: str, rows: list[str], links: list[tuple[str, int, float]]) -> None:
    matrix = parse_topology(topology_text(rows))
    assert matrix is not None
    found = gpu_links(matrix, DEVICES[name])
    assert [(link.name, link.devices, pytest.approx(link.bandwidth)) for link in found] == links


def test_network_cards_beside_the_gpus_do_not_count() -> None:
    text = """\
        GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    PXB     SYS     0-47    0               N/A
GPU1    NV18     X      SYS     PXB     48-95   1               N/A
NIC0    PXB     SYS      X      SYS
NIC1    SYS     PXB     SYS      X

NIC Legend:

  NIC0: mlx5_0
"""
    assert parse_topology(text) == [["X", "NV18"], ["NV18", "X"]]


@pytest.mark.parametrize(
    "text", ["", "NVIDIA H200, 143771", "GPU0 X NV1\nGPU1 NV1 NV1 ", "Failed to get topology\n", "GPU0 NV1 NV1"]
)
def test_a_text_without_gpus_is_no_topology(text: str) -> None:
    assert parse_topology(text) is None


def test_a_cluster_of_several_nodes_has_the_links_of_a_node_and_the_network() -> None:
    matrix = parse_topology(topology_text(PAIRS))
    assert matrix is not None
    device = DEVICES["RTX-A6000"]
    links = gpu_links(matrix, device)
    one = Cluster(device=device, devices_per_node=4, links=links)
    three = Cluster(device=device, num_nodes=3, devices_per_node=4, links=links)
    half = Cluster(device=device, num_nodes=1, devices_per_node=2, links=links)
    assert one.levels == links
    assert [(link.name, link.devices) for link in three.levels] == [("NVLink", 2), ("sockets", 4), ("Ethernet", 12)]
    assert [(link.name, link.devices) for link in half.levels] == [("NVLink", 2)]


def card(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_infiniband_cards_add_up_and_idle_ports_do_not(tmp_path: Path) -> None:
    for place in range(8):
        port = tmp_path / "class" / "infiniband" / f"mlx5_{place}" / "ports" / "1"
        card(port, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE")
    card(tmp_path / "class/infiniband/mlx5_8/ports/1", rate="100 Gb/sec (4X EDR)", state="1: DOWN")
    card(tmp_path / "class/net/eth0/device", vendor="0x15b3")
    card(tmp_path / "class/net/eth0/x", unused="")
    assert read_network(tmp_path) == 8 * 50e9


def test_plain_ethernet_is_the_fastest_card_that_is_up(tmp_path: Path) -> None:
    for name, speed, state in (("eth0", "10000", "up"), ("eth1", "25000", "down"), ("eth2", "1000", "up")):
        card(tmp_path / "class" / "net" / name, speed=speed, operstate=state, device="")
    card(tmp_path / "class/net/docker0", speed="100000", operstate="up")  # a virtual interface
    card(tmp_path / "class/net/ens5", speed="-1", operstate="up", device="")  # unknown speed, as in some clouds
    assert read_network(tmp_path) == 1.25e9


def test_a_machine_without_cards_has_no_network_bandwidth(tmp_path: Path) -> None:
    assert read_network(tmp_path) == 0

"""Parsing clusters: texts and files become clusters, or one clear error."""

from pathlib import Path

import pytest

from trimaran.core import GIB, UserError
from trimaran.machine import DEVICES, Cluster, find_device, parse_cluster


@pytest.mark.parametrize(
    ("text", "name", "num_nodes", "devices_per_node"),
    [
        ("H100", "H100", 1, 1),
        ("8xH100", "H100", 1, 8),
        ("4x8xA100-80GB", "A100-80GB", 4, 8),
        (" 4x8xa100 ", "A100-80GB", 4, 8),
        ("8xmi300x", "MI300X", 1, 8),
        ("2x4090", "RTX4090", 1, 2),
        ("2xrtx 4090", "RTX4090", 1, 2),
        ("16xH100", "H100", 2, 8),
        ("12xH200", "H200", 2, 6),
        ("72xGB200", "GB200", 1, 72),
        ("8h100", "H100", 1, 8),
        ("8 H100", "H100", 1, 8),
        ("8 x H100", "H100", 1, 8),
        ("8×H100", "H100", 1, 8),
        ("4 x 8 x A100-80GB", "A100-80GB", 4, 8),
        ("4x8h100", "H100", 4, 8),
        ("h100x8", "H100", 1, 8),
        ("MI300X x 8", "MI300X", 1, 8),
        ("A100-80GB x 4", "A100-80GB", 1, 4),
    ],
)
def test_a_text_names_nodes_and_devices(text: str, name: str, num_nodes: int, devices_per_node: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node) == (name, num_nodes, devices_per_node)
    assert cluster.world_size == num_nodes * devices_per_node


@pytest.mark.parametrize(("text", "fix"), [("4x8", "4x8xH100"), ("8", "8xH100"), ("4 x 8", "4x8xH100")])
def test_a_cluster_without_a_device_is_asked_for_one(text: str, fix: str) -> None:
    with pytest.raises(UserError, match="names no device") as caught:
        parse_cluster(text)
    assert caught.value.fix.endswith(fix)


def test_a_cluster_reads_back_as_itself() -> None:
    for text in ("1xH100", "8xH100", "4x8xA100-80GB", "4xA100-80GB+4xL40S", "8xH100+2x8xA100-80GB+8xH100"):
        assert str(parse_cluster(text)) == text


def test_groups_of_several_kinds_are_one_cluster() -> None:
    cluster = parse_cluster(" 4xA100 + 2x4xL40S ")
    assert [(group.device.name, group.num_nodes) for group in cluster.groups] == [("A100-80GB", 1), ("L40S", 2)]
    assert (cluster.world_size, cluster.num_nodes, cluster.devices_per_node) == (12, 3, 4)
    assert cluster.group_ranks == (range(4), range(4, 12))
    assert cluster.device.name == "L40S"  # has the least memory
    network = min(each.network_bandwidth for each in cluster.devices)
    assert cluster.levels[-1].bandwidth == network
    alone = cluster.only(cluster.groups[0])
    assert (alone.device.name, alone.world_size, alone.levels[-1].bandwidth) == ("A100-80GB", 12, network)
    assert parse_cluster("4xH100+4xH100") == parse_cluster("2x4xH100")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("8xA100-80GB+4xL40S", "C012"),
        ("2xcpu+2xcpu", "C012"),
        ("4xH100+", "C002"),
        ("+4xH100", "C002"),
        ("4xH100+4xH1000", "C001"),
        ("4xH100+0xL40S", "C003"),
    ],
)
def test_a_mistake_in_a_group_is_one_error(text: str, code: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_cluster(text)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("8xH1000", "C001", "did you mean 'H100'?"),
        ("4x4x4xH100", "C002", "is not a cluster"),
        ("", "C002", "is not a cluster"),
        ("8 * H100", "C002", "is not a cluster"),
        ("0xH100", "C003", "no devices"),
        ("11xH100", "C003", "do not fill 2 equal nodes"),
        ("999999x999999xH100", "C003", "more than"),
        ("nowhere.yaml", "C004", "cannot be read"),
    ],
)
def test_an_invalid_text_is_one_clear_error(text: str, code: str, message: str) -> None:
    with pytest.raises(UserError, match=code) as caught:
        parse_cluster(text)
    assert message in caught.value.what
    assert caught.value.fix


def test_a_file_replaces_the_values_of_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("{device: h100, num_nodes: 2, network_gb_per_second: 12.5, memory_gib: 94}")
    cluster = parse_cluster(str(file))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.device.network_bandwidth == 12.5e9
    assert cluster.device.memory_bytes == 94 * GIB
    assert cluster.device.link_bandwidth == DEVICES["H100"].link_bandwidth


def test_a_file_describes_links_level_by_level(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("""
device: A100-PCIe-80GB
num_nodes: 4
devices_per_node: 8
host_memory_gib: 512
links:
  - {name: NVLink, devices: 2, gb_per_second: 300, latency_us: 4, reached: {all_reduce: 230, send: 200}}
  - {name: PCIe, devices: 8, gb_per_second: 31}
  - {name: RoCE, gb_per_second: 12.5}
""")
    cluster = parse_cluster(str(file))
    assert cluster.host_bytes == 512 * GIB
    pair, node, network = cluster.levels
    assert (pair.name, pair.devices, pair.bandwidth) == ("NVLink", 2, 300e9)
    assert pair.latency == pytest.approx(4e-6)
    assert pair.reached == {"all_reduce": 230e9, "send": 200e9}
    assert (node.devices, node.bandwidth) == (8, 31e9)
    assert (network.name, network.devices, network.bandwidth) == ("RoCE", 32, 12.5e9)
    assert node.latency < network.latency


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{device: H100, node: 2}", "C005", "no field 'node'"),
        ("{device: H1000}", "C001", "did you mean 'H100'?"),
        ("{device: H100, memory_gib: -80}", "C005", "memory_gib"),
        ("{device: H100, num_nodes: -2}", "C005", "num_nodes"),
        ("{device: H100, links: 3}", "C005", "links"),
        ("{device: H100, links: [{name: NVLink}]}", "C005", "links.0.gb_per_second"),
        (
            "{device: H100, links: [{name: a, gb_per_secnd: 3, gb_per_second: 3}]}",
            "C005",
            "did you mean 'gb_per_second'?",
        ),
        ("{device: H100, links: [{name: a, gb_per_second: 3, reached: {al_reduce: 2}}]}", "C005", "'all_reduce'?"),
        ("{device: H100, links: [{name: a, gb_per_second: .inf}]}", "C005", "links.0.gb_per_second"),
        ("{device: H100, links: [{name: a, gb_per_second: 3, devices: 4}]}", "C007", "connects 4 devices of 8"),
        (
            "{device: H100, links: [{name: a, gb_per_second: 3, devices: 3}, {name: b, gb_per_second: 1}]}",
            "C007",
            "a link of 3 devices does not fit into one of 8",
        ),
        (
            "{device: H100, links: [{name: a, gb_per_second: 3}, {name: b, gb_per_second: 1}]}",
            "C007",
            "a link of all devices",
        ),
        ("{device: H100, link_gb_per_second: 4, links: [{name: a, gb_per_second: 3}]}", "C007", "set twice"),
        ("{device: H100, calibration: {bf16_tflops: 0}}", "C006", "bf16_tflops"),
        ("{device: H100, calibration: [1]}", "C005", "calibration"),
        ("{num_nodes: 2}", "C005", "device"),
        ("{device: H100, num_nodes: 0}", "C005", "num_nodes"),
        ("{device: H100, num_nodes: [1]}", "C005", "num_nodes"),
        ("- H100", "C004", "mapping"),
        ("device: 2024-13-45", "C004", "'2024-13-45' is not a valid date"),
        ("{1: 2}", "C005", "device"),
        ("{device: [", "C004", "not YAML"),
        ("[" * 600, "C004", "nesting"),
        ("device: H100 #" + "x" * 70_000, "C004", "mapping"),
        ("{device: !!python/object/apply:os.getcwd []}", "C004", "os.getcwd"),
        ("device: &x H100\nlinks: *x", "C004", "alias"),
        ("{device: H100, num_nodes: !!int abc}", "C004", "'abc' is not a valid integer"),
        ("{device: H100, num_nodes: " + "9" * 5000 + "}", "C004", "5,000 characters"),
    ],
)
def test_an_invalid_file_is_one_clear_error(tmp_path: Path, text: str, code: str, message: str) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=code) as caught:
        parse_cluster(str(file))
    assert message in caught.value.what


def test_every_device_has_the_rates_that_a_prediction_needs() -> None:
    for device in DEVICES.values():
        assert device.memory_bytes > GIB
        assert device.peak("fp32") > 0
        assert 0.4 < device.achievable <= 1
        assert min(device.memory_bandwidth, device.link_bandwidth, device.network_bandwidth) > 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-80GB", "H100"),
        ("h100-sxm5-80gb", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100_pcie", "H100-PCIe"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("a100_40gb", "A100-40GB"),
        ("A100-PCIe", "A100-PCIe-80GB"),
        ("V100", "V100-32GB"),
        ("V100-SXM2-16GB", "V100-16GB"),
        ("RTX-4090", "RTX4090"),
        ("GeForce RTX 3090", "RTX3090"),
        ("A6000", "RTX-A6000"),
        ("H200-141GB", "H200"),
        ("GB200-NVL72", "GB200"),
        ("MI300X-192GB", "MI300X"),
    ],
)
def test_a_device_is_found_in_any_spelling(text: str, name: str) -> None:
    assert find_device(text).name == name


@pytest.mark.parametrize("text", ["H100-40GB", "A100-SXM4-16GB", "H100-PCIe-XYZ", "nvidia", "GTX1080", ""])
def test_a_device_that_does_not_exist_is_not_guessed(text: str) -> None:
    with pytest.raises(UserError, match="C001"):
        find_device(text)


def test_every_name_of_the_catalogue_finds_itself() -> None:
    assert [find_device(name).name for name in DEVICES] == list(DEVICES)


def test_a_precision_that_a_device_lacks_runs_like_fp32() -> None:
    for name in ("V100", "T4"):
        device = find_device(name)
        assert device.peak("bf16") == device.peak("fp32") < device.peak("fp16") / 7
    assert find_device("V100").achievable_flops("fp16") == pytest.approx(0.75 * 125e12)
    assert find_device("H100").achievable_flops("bf16") == pytest.approx(795e12)


def test_cpu_ranks_share_the_cores_and_the_memory_of_this_machine() -> None:
    two, four = parse_cluster("2xcpu"), parse_cluster("4xcpu")
    assert (two.world_size, four.world_size, four.num_nodes) == (2, 4, 1)
    assert four.device.peak("fp32") == pytest.approx(two.device.peak("fp32") / 2)
    assert four.device.memory_bytes < two.device.memory_bytes
    assert "quick estimate" in four.device.note


def test_clusters_are_values() -> None:
    assert parse_cluster("8xH100") == Cluster(device=DEVICES["H100"], devices_per_node=8)


def test_the_guide_lists_every_device_with_its_memory() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "clusters.md").read_text()
    for device in DEVICES.values():
        assert device.kind == "cpu" or f"\n| {device.name} | {device.memory_bytes / GIB:.1f} |" in guide

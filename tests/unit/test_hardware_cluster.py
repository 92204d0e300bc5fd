"""Cluster texts and files become clusters, or one clear error."""

from pathlib import Path

import pytest

from trimaran.core import GIB, UserError
from trimaran.hardware import DEVICES, Cluster, find_device, parse_cluster


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
    ],
)
def test_a_text_names_nodes_and_devices(text: str, name: str, num_nodes: int, devices_per_node: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node) == (name, num_nodes, devices_per_node)
    assert cluster.world_size == num_nodes * devices_per_node


def test_a_cluster_reads_back_as_itself() -> None:
    for text in ("1xH100", "8xH100", "4x8xA100-80GB"):
        assert str(parse_cluster(text)) == text


@pytest.mark.parametrize(
    ("text", "code", "words"),
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
def test_a_wrong_text_is_one_clear_error(text: str, code: str, words: str) -> None:
    with pytest.raises(UserError, match=code) as caught:
        parse_cluster(text)
    assert words in caught.value.what
    assert caught.value.fix


def test_a_file_replaces_what_the_catalogue_guesses(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("{device: h100, num_nodes: 2, network_gb_per_second: 12.5, memory_gib: 94}")
    cluster = parse_cluster(str(file))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.device.network_bandwidth == 12.5e9
    assert cluster.device.memory_bytes == 94 * GIB
    assert cluster.device.link_bandwidth == DEVICES["H100"].link_bandwidth


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("{device: H100, node: 2}", "C005", "no field 'node'"),
        ("{num_nodes: 2}", "C005", "device"),
        ("{device: H100, num_nodes: 0}", "C005", "num_nodes"),
        ("{device: H100, num_nodes: [1]}", "C005", "num_nodes"),
        ("- H100", "C004", "mapping"),
        ("device: 2024-13-45", "C004", "mapping"),
        ("{1: 2}", "C005", "device"),
        ("{device: [", "C004", "mapping"),
        ("[" * 600, "C004", "mapping"),
        ("device: H100 #" + "x" * 70_000, "C004", "mapping"),
        ("{device: !!python/object/apply:os.getcwd []}", "C004", "mapping"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, code: str, words: str) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=code) as caught:
        parse_cluster(str(file))
    assert words in caught.value.what


def test_every_device_has_the_rates_that_a_prediction_needs() -> None:
    for device in DEVICES.values():
        assert device.memory_bytes > GIB
        assert device.peak("fp32") > 0
        assert 0.4 < device.achievable <= 1
        assert min(device.memory_bandwidth, device.link_bandwidth, device.network_bandwidth) > 0


def test_a_precision_that_a_device_lacks_runs_like_fp32() -> None:
    v100 = find_device("V100")
    assert v100.peak("bf16") == v100.peak("fp32") == 15.7e12
    assert find_device("H100").achievable_flops("bf16") == pytest.approx(795e12)


def test_cpu_ranks_share_the_cores_and_the_memory_of_this_machine() -> None:
    two, four = parse_cluster("2xcpu"), parse_cluster("4xcpu")
    assert (two.world_size, four.world_size, four.num_nodes) == (2, 4, 1)
    assert four.device.peak("fp32") == pytest.approx(two.device.peak("fp32") / 2)
    assert four.device.memory_bytes < two.device.memory_bytes
    assert "first guess" in four.device.note


def test_clusters_are_values() -> None:
    assert parse_cluster("8xH100") == Cluster(device=DEVICES["H100"], devices_per_node=8)

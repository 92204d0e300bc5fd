"""Detecting this machine, with a fake nvidia-smi script."""

import json
import os
from pathlib import Path

import pytest

from trimaran.core import GIB
from trimaran.machine import DEVICES, cpu_flops, detect, gpu_device


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a fake `nvidia-smi` that runs the given script first on the path."""

    def answer(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answer


def test_ranks_share_the_cores_of_a_cpu_and_no_other_device() -> None:
    assert [name for name, each in DEVICES.items() if each.traits.shares_cores] == ["cpu"]


def test_gpus_are_counted_and_named_by_the_driver(driver) -> None:
    driver("printf 'NVIDIA H200, 143771\\nNVIDIA H200, 143771\\n'")
    cluster = detect()
    assert str(cluster) == "2xH200"
    assert cluster.device.memory_bytes / GIB == pytest.approx(139.8, rel=0.005)  # as torch reports it there


def test_only_the_visible_gpus_are_queried(driver) -> None:
    driver('case "$*" in *--id=0,2*) echo "NVIDIA A100-SXM4-80GB, 81920";; *) exit 6;; esac')
    assert str(detect(visible_devices="0,2")) == "1xA100-80GB"


@pytest.mark.parametrize("script", ["exit 9", "echo 'NVIDIA Thor, [N/A]'"])
def test_without_an_answer_of_the_driver_the_cpu_is_used(driver, script: str) -> None:
    driver(script)
    cluster = detect()
    assert cluster.device.kind == "cpu"
    assert 1 <= cluster.world_size <= min(len(os.sched_getaffinity(0)), 8)


def test_with_hidden_gpus_the_cpu_is_used(driver) -> None:
    driver("echo 'NVIDIA H200, 143771'")
    assert detect(visible_devices="").device.kind == "cpu"


@pytest.mark.parametrize(
    ("name", "mebibytes", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-PCIE-80GB", 81920, "A100-PCIe-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA L4", 23034, "L4"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA A10G", 23028, "A10G"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL"),
        ("NVIDIA H20", 97871, "H20"),
        ("NVIDIA GH200 480GB", 97871, "GH200"),
        ("AMD Instinct MI300X OAM", 196592, "MI300X"),
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA GB200", 189471, "GB200"),
    ],
)
def test_marketing_names_find_their_device(name: str, mebibytes: int, found: str) -> None:
    device = gpu_device([(name, mebibytes)])
    assert device.name == found
    assert device.memory_bytes == pytest.approx(DEVICES[found].memory_bytes, rel=0.015)


@pytest.mark.parametrize("name", ["NVIDIA A100-PCIE-80GB", "Tesla V100-PCIE-16GB"])
def test_a_pcie_card_has_no_nvlink(name: str) -> None:
    device = gpu_device([(name, 16384)])
    assert device.link_bandwidth == device.pcie_bandwidth


def test_the_topology_of_the_driver_becomes_links(driver) -> None:
    names = "\\n".join(["NVIDIA RTX A6000, 49140"] * 4)
    rows = "\\n".join(["GPU0 X NV4 SYS SYS", "GPU1 NV4 X SYS SYS", "GPU2 SYS SYS X NV4", "GPU3 SYS SYS NV4 X"])
    driver(f"case \"$1\" in topo) printf '{rows}\\n';; *) printf '{names}\\n';; esac")
    assert [(link.name, link.devices) for link in detect().levels] == [("NVLink", 2), ("sockets", 4)]
    assert detect().host_bytes > GIB


def test_only_the_visible_gpus_have_links(driver) -> None:
    names = "\\n".join(["NVIDIA RTX A6000, 49140"] * 2)
    rows = "\\n".join(["GPU0 X NV4 SYS SYS", "GPU1 NV4 X SYS SYS", "GPU2 SYS SYS X NV4", "GPU3 SYS SYS NV4 X"])
    driver(f"case \"$1\" in topo) printf '{rows}\\n';; *) printf '{names}\\n';; esac")
    for visible, way in (("0,1", "NVLink"), ("0,2", "sockets"), ("GPU-aa,GPU-bb", "PCIe")):
        assert [link.name for link in detect(visible_devices=visible).levels] == [way]


def test_amd_gpus_are_queried_if_there_are_no_others(driver, tmp_path: Path) -> None:
    driver("exit 9")
    cards = {f"card{place}": {"Card Series": "AMD Instinct MI300X OAM", "VRAM Total Memory (B)": "206141652992"}
             for place in range(2)}  # fmt: skip
    tool = tmp_path / "rocm-smi"
    tool.write_text(f"#!/bin/sh\necho '{json.dumps(cards)}'\n")
    tool.chmod(0o755)
    assert str(detect()) == "2xMI300X"
    assert detect(visible_devices="1").world_size == 1
    tool.write_text("#!/bin/sh\necho '[1, 2]'\n")
    assert detect().device.kind == "cpu"


def test_the_rates_of_an_unknown_gpu_are_marked_as_a_guess() -> None:
    device = gpu_device([("NVIDIA RTX A1000", 8192)])
    assert device.name == "NVIDIA RTX A1000"
    assert device.memory_bytes < 8 * GIB
    assert "guess" in device.note


def test_mixed_gpus_are_planned_as_the_smallest() -> None:
    device = gpu_device([("NVIDIA H200", 143771), ("NVIDIA A100-SXM4-40GB", 40960)])
    assert device.name == "A100-40GB"
    assert "mixes" in device.note


def test_the_estimated_cpu_rate_is_plausible() -> None:
    assert 1e9 < cpu_flops() < 1e12
    assert cpu_flops(4) == 4 * cpu_flops()

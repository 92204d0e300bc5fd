"""This machine, asked through a driver tool that is a small script of ours."""

import os
from pathlib import Path

import pytest

from trimaran.core import GIB
from trimaran.hardware import DEVICES, detect
from trimaran.hardware.calibrate import cpu_flops
from trimaran.hardware.detect import gpu_device


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a `nvidia-smi` first on the path that answers as told."""

    def answer(script: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answer


def test_gpus_are_counted_and_named_by_the_driver(driver) -> None:
    driver("printf 'NVIDIA H200, 143771\\nNVIDIA H200, 143771\\n'")
    cluster = detect()
    assert str(cluster) == "2xH200"
    assert cluster.device.memory_bytes / GIB == pytest.approx(139.8, rel=0.005)  # as torch reports it there


def test_only_the_visible_gpus_are_asked_for(driver) -> None:
    driver('case "$*" in *--id=0,2*) echo "NVIDIA A100-SXM4-80GB, 81920";; *) exit 6;; esac')
    assert str(detect(visible_devices="0,2")) == "1xA100-80GB"


@pytest.mark.parametrize("script", ["exit 9", "echo 'NVIDIA Thor, [N/A]'"])
def test_a_driver_without_an_answer_leaves_the_cpu(driver, script: str) -> None:
    driver(script)
    cluster = detect()
    assert cluster.device.kind == "cpu"
    assert 1 <= cluster.world_size <= min(len(os.sched_getaffinity(0)), 8)


def test_hidden_gpus_leave_the_cpu(driver) -> None:
    driver("echo 'NVIDIA H200, 143771'")
    assert detect(visible_devices="").device.kind == "cpu"


@pytest.mark.parametrize(
    ("name", "mebibytes", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-PCIE-80GB", 81920, "A100-80GB"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA GB200", 189471, "GB200"),
    ],
)
def test_marketing_names_find_their_device(name: str, mebibytes: int, found: str) -> None:
    device = gpu_device([(name, mebibytes)])
    assert device.name == found
    assert device.memory_bytes == pytest.approx(DEVICES[found].memory_bytes, rel=0.015)


def test_a_pcie_card_has_no_nvlink() -> None:
    assert gpu_device([("NVIDIA A100-PCIE-80GB", 81920)]).link_bandwidth == DEVICES["A100-80GB"].pcie_bandwidth


def test_an_unknown_gpu_is_said_to_be_a_guess() -> None:
    device = gpu_device([("NVIDIA RTX A1000", 8192)])
    assert device.name == "NVIDIA RTX A1000"
    assert device.memory_bytes < 8 * GIB
    assert "guess" in device.note


def test_unlike_gpus_are_planned_as_the_smallest() -> None:
    device = gpu_device([("NVIDIA H200", 143771), ("NVIDIA A100-SXM4-40GB", 40960)])
    assert device.name == "A100-40GB"
    assert "mixes" in device.note


def test_the_measured_rate_is_one_of_this_century() -> None:
    assert 1e9 < cpu_flops() < 1e12
    assert cpu_flops(4) == 4 * cpu_flops()

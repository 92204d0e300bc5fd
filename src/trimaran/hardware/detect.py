"""What this machine is: its GPUs as the driver names them, or its cores. Torch is not asked."""

import os
import re
import subprocess
from dataclasses import replace

import psutil

from trimaran.core import Bytes, Flops
from trimaran.hardware.calibrate import cpu_flops
from trimaran.hardware.catalogue import CPU, DEVICES, Device
from trimaran.hardware.cluster import Cluster

MAX_CPU_RANKS = 8
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
DRIVER_SHARE = 0.007  # of the memory that the driver lists, what CUDA keeps from every process
UNKNOWN_GPU = replace(DEVICES["V100-16GB"], peak_flops={"fp32": Flops(15e12), "bf16": Flops(60e12)})


def detect(*, visible_devices: str | None = None) -> Cluster:
    """Return this machine as a cluster of one node: its NVIDIA GPUs, else one rank for each core, at most eight.

    `visible_devices` is the value of CUDA_VISIBLE_DEVICES, which the driver's tool does not heed and only `app` reads.
    """
    if gpus := _list_gpus(visible_devices):
        return Cluster(device=gpu_device(gpus), devices_per_node=len(gpus))
    return cpu_cluster(min(_num_cores(), MAX_CPU_RANKS))


def cpu_cluster(num_ranks: int) -> Cluster:
    """Return `num_ranks` gloo ranks that share this machine's cores and the memory that is free now."""
    cores = _num_cores()
    device = replace(
        CPU,
        memory_bytes=Bytes(psutil.virtual_memory().available // num_ranks),
        peak_flops={"fp32": Flops(cpu_flops(cores) / num_ranks)},
        memory_bandwidth=CPU.memory_bandwidth * cores / num_ranks,
        note=f"a first guess, timed on this machine in a moment; cores per rank: {cores / num_ranks:.2g}",
    )
    return Cluster(device=device, devices_per_node=num_ranks)


def gpu_device(gpus: list[tuple[str, float]]) -> Device:
    """Return the device that stands for all `gpus`, pairs of the driver's name and MiB: the smallest of them."""
    name, mebibytes = min(gpus, key=lambda gpu: gpu[1])
    memory = Bytes(int(mebibytes * 2**20 * (1 - DRIVER_SHARE)))
    words = set(re.split(r"[\s_-]+", name.upper()))
    family = [each for each in DEVICES.values() if each.kind == "cuda" and _model_word(each) in words]
    if not family:
        return replace(
            UNKNOWN_GPU, name=name, memory_bytes=memory, note="not in the catalogue, so its rates are a guess"
        )
    nearest = min(
        family, key=lambda each: (("PCIE" in words) != ("PCIe" in each.name), abs(each.memory_bytes - memory))
    )
    link = nearest.pcie_bandwidth if "PCIE" in words else nearest.link_bandwidth
    note = f"{nearest.note}; the node mixes devices" if len(set(gpus)) > 1 else nearest.note
    return replace(nearest, memory_bytes=memory, link_bandwidth=link, note=note)


def _model_word(device: Device) -> str:
    """Return the word that a driver's name has to contain: `NVIDIA GeForce RTX 4090`, `NVIDIA A100-SXM4-80GB`."""
    return device.name.upper().removeprefix("RTX").partition("-")[0]


def _list_gpus(visible: str | None) -> list[tuple[str, float]]:
    if visible is not None and not visible.strip(", "):
        return []
    try:
        chosen = () if visible is None else (f"--id={visible}",)
        lines = subprocess.run((*QUERY, *chosen), capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # no driver, no answer, or no such device: nothing that CUDA could use
    rows = (line.rpartition(",") for line in lines.splitlines())
    # A Grace-Blackwell or an iGPU may answer `[N/A]`, which is not a memory to plan with.
    return [(name.strip(), float(memory)) for name, _, memory in rows if memory.strip().isdigit()]


def _num_cores() -> int:
    """Return the cores this process may use. Two hyper-threads are one: a matrix product gains nothing from them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)

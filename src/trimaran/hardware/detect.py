"""What this machine is: its GPUs as the driver names and wires them, or its cores. Torch is not asked."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from trimaran.core import Bytes, Flops
from trimaran.hardware.calibrate import cpu_flops
from trimaran.hardware.calibration import apply_calibration, find_calibration
from trimaran.hardware.cluster import Cluster, Link
from trimaran.hardware.device_catalogue import CPU, DEVICES, Device, model_words
from trimaran.hardware.gpu_topology import links_of, parse_topology, read_network

MAX_CPU_RANKS = 8
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
ROCM_QUERY = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
DRIVER_SHARE = 0.007  # of the memory that the driver lists, what CUDA keeps from every process
UNKNOWN_GPU = replace(DEVICES["V100-16GB"], peak_flops={"fp32": Flops(15e12), "bf16": Flops(60e12)})


def detect(*, visible_devices: str | None = None, calibrations: Path | None = None) -> Cluster:
    """Return this machine as a cluster of one node: its GPUs, else one rank for each core, at most eight.

    `visible_devices` is the value of CUDA_VISIBLE_DEVICES, which the driver's tool does not heed and only `app` reads.
    `calibrations` is the folder of measurements: those of this machine replace what the catalogue says.
    """
    if gpus := _list_gpus(visible_devices) or _list_amd_gpus(visible_devices):
        cluster = _gpu_cluster(gpus, visible_devices)
        calibration = find_calibration(calibrations, machine_name(cluster))
        return apply_calibration(cluster, calibration) if calibration else cluster
    return cpu_cluster(min(num_cores(), MAX_CPU_RANKS), calibrations=calibrations)


def cpu_cluster(num_ranks: int, *, calibrations: Path | None = None) -> Cluster:
    """Return `num_ranks` gloo ranks that share this machine's cores and the memory that is free now."""
    cores = num_cores()
    share, free_bytes = cores / num_ranks, psutil.virtual_memory().available
    device = replace(
        CPU,
        memory_bytes=Bytes(free_bytes // num_ranks),
        memory_bandwidth=CPU.memory_bandwidth * share,
        note=f"cores per rank: {share:.2g}",
    )
    cluster = Cluster(device=device, devices_per_node=num_ranks, host_bytes=Bytes(free_bytes))
    if calibration := find_calibration(calibrations, machine_name(cluster)):
        return apply_calibration(cluster, calibration)
    guess, note = Flops(cpu_flops(cores) / num_ranks), "a first guess, timed on this machine in a moment"
    return replace(cluster, device=replace(device, peak_flops={"fp32": guess}, note=f"{note}; {device.note}"))


def machine_name(cluster: Cluster) -> str:
    """Return the file name of what is measured here. Machines that are alike share one, so a cluster needs one file.

    GPUs are named one by one, because a rank may see any number of them; cores are counted, because ranks share them.
    """
    if cluster.device.kind == "cuda":
        return _file_name(cluster.device.name)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return _file_name(f"cpu {model} {num_cores()} cores")


def gpu_device(gpus: Sequence[tuple[str, float]]) -> Device:
    """Return the device that stands for all `gpus`, pairs of the driver's name and MiB: the smallest of them."""
    name, mebibytes = min(gpus, key=lambda gpu: gpu[1])
    memory = Bytes(int(mebibytes * 2**20 * (1 - DRIVER_SHARE)))
    words = set(re.split(r"[\s_-]+", name.upper()))
    family = [each for each in DEVICES.values() if each.kind == "cuda" and model_words(each) <= words]
    if not family:
        return replace(
            UNKNOWN_GPU, name=name, memory_bytes=memory, note="not in the catalogue, so its rates are a guess"
        )
    nearest = min(family, key=lambda each: (-len(model_words(each)), abs(each.memory_bytes - memory)))
    link = nearest.pcie_bandwidth if "PCIE" in words else nearest.link_bandwidth
    note = f"{nearest.note}; the node mixes devices" if len(set(gpus)) > 1 else nearest.note
    return replace(nearest, memory_bytes=memory, link_bandwidth=link, note=note)


def num_cores() -> int:
    """Return the cores this process may use. Two hyper-threads are one: a matrix product gains nothing from them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _gpu_cluster(gpus: Sequence[tuple[str, float]], visible: str | None) -> Cluster:
    device = gpu_device(gpus)
    if network := read_network():
        device = replace(device, network_bandwidth=network / len(gpus))
    host_bytes = Bytes(psutil.virtual_memory().total)
    links = _wired(device, len(gpus), visible)
    return Cluster(device=device, devices_per_node=len(gpus), links=links, host_bytes=host_bytes)


def _wired(device: Device, num_gpus: int, visible: str | None) -> tuple[Link, ...]:
    """Return how the visible GPUs are joined; nothing where the driver does not say: then the device's own link."""
    matrix = parse_topology(_ask(TOPOLOGY)) if num_gpus > 1 else None
    if matrix is None:
        return ()
    chosen = (
        list(range(len(matrix))) if visible is None else [int(each) for each in visible.split(",") if each.isdigit()]
    )
    if len(chosen) != num_gpus or max(chosen) >= len(matrix):
        return ()  # chosen by UUID, or a container that counts differently
    return links_of([[matrix[row][column] for column in chosen] for row in chosen], device)


def _list_gpus(visible: str | None) -> list[tuple[str, float]]:
    if visible is not None and not visible.strip(", "):
        return []
    chosen = () if visible is None else (f"--id={visible}",)
    rows = (line.rpartition(",") for line in _ask((*QUERY, *chosen)).splitlines())
    # A Grace-Blackwell or an iGPU may answer `[N/A]`, which is not a memory to plan with.
    return [(name.strip(), float(memory)) for name, _, memory in rows if memory.strip().isdigit()]


def _list_amd_gpus(visible: str | None) -> list[tuple[str, float]]:
    if visible is not None and not visible.strip(", "):
        return []
    try:
        cards = json.loads(_ask(ROCM_QUERY) or "{}")
        pairs = [(str(card["Card Series"]), float(card["VRAM Total Memory (B)"]) / 2**20) for card in cards.values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # another version of the tool, or no card
    chosen = range(len(pairs)) if visible is None else [int(each) for each in visible.split(",") if each.isdigit()]
    return [pairs[place] for place in chosen if place < len(pairs)]


def _ask(command: Sequence[str]) -> str:
    """Return what a driver's tool answers; nothing where there is no tool, no answer, or no such device."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")

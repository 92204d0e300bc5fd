"""Detects this machine: its GPUs and their links from the driver's tools, or its cores. Imports no torch."""

import functools
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from trimaran.core import Bytes, Flops, Seconds
from trimaran.machine.calibration import (
    MIN_GLOO_LATENCY_SECONDS,
    apply_calibration,
    apply_measured,
    find_calibration,
    with_fitted,
)
from trimaran.machine.cluster import Cluster, Link, default_links
from trimaran.machine.cpu_rates import CpuRates, cpu_rates_path, read_cpu_rates
from trimaran.machine.device_catalogue import CPU, DEVICES, Device, model_words
from trimaran.machine.gpus import TOPOLOGY_MATRIX, gpu_links, list_gpus, parse_topology, read_network, run_driver_tool

MAX_CPU_RANKS = 8
DRIVER_FRACTION = 0.007  # of the memory that the driver lists, reserved by CUDA in every process
UNKNOWN_GPU = replace(DEVICES["V100-16GB"], peak_flops={"fp32": Flops(15e12), "bf16": Flops(60e12)})

# The matmuls that estimate the rate of a core, see `_core_flops`.
MATMUL_WIDTH = 64
NUM_MATMULS = 256
NUM_TRIES = 24


def detect(
    *, visible_devices: str | None = None, calibrations: Path | None = None, threads: int | None = None
) -> Cluster:
    """Return this machine as a cluster of one node: its GPUs, or one rank per core, at most eight.

    `visible_devices` is the value of CUDA_VISIBLE_DEVICES, which nvidia-smi ignores and only `app` reads.
    `calibrations` is the folder of measurements. Those of this machine replace the rates of the catalogue.
    `threads` is how many each rank of a CPU gets, if the user set OMP_NUM_THREADS.
    """
    if gpus := list_gpus(visible_devices):
        device = gpu_device(gpus)
        if network := read_network():
            device = replace(device, network_bandwidth=network / len(gpus))
        host_bytes = Bytes(psutil.virtual_memory().total)
        links = _read_gpu_links(device, len(gpus), visible_devices)
        cluster = Cluster(device=device, devices_per_node=len(gpus), links=links, host_bytes=host_bytes)
        calibration = find_calibration(calibrations, machine_name(cluster))
        return apply_calibration(cluster, calibration) if calibration else cluster
    return cpu_cluster(min(num_cores(), MAX_CPU_RANKS), calibrations=calibrations, threads=threads)


def cpu_cluster(num_ranks: int, *, calibrations: Path | None = None, threads: int | None = None) -> Cluster:
    """Return `num_ranks` gloo ranks that share this machine's cores and its free memory."""
    cores = num_cores()
    cores_per_rank, free_bytes = cores / num_ranks, psutil.virtual_memory().available
    device = replace(
        CPU,
        memory_bytes=Bytes(free_bytes // num_ranks),
        memory_bandwidth=CPU.memory_bandwidth * cores_per_rank,
        note=f"cores per rank: {cores_per_rank:.2g}",
    )
    cluster = Cluster(device=device, devices_per_node=num_ranks, host_bytes=Bytes(free_bytes))
    calibration = find_calibration(calibrations, machine_name(cluster))
    is_measured = calibration is not None and calibration.is_measured
    if calibration:
        cluster = apply_measured(cluster, calibration)
    path = cpu_rates_file(calibrations, num_ranks, threads)
    if path and (rates := read_cpu_rates(path)):
        keeps_links = is_measured or (calibration is not None and calibration.collectives is not None)
        cluster = with_cpu_rates(cluster, rates, keeps_links=keeps_links)
    elif not is_measured:
        estimate, note = Flops(cpu_flops(cores) / num_ranks), "not calibrated, a quick estimate, timed on this machine"
        device = replace(device, peak_flops={"fp32": estimate}, note=f"{note}; {device.note}")
        cluster = replace(cluster, device=device)
    return with_fitted(cluster, calibration.fitted if calibration else None)


def cpu_rates_file(calibrations: Path | None, num_ranks: int, threads: int | None = None) -> Path | None:
    """Return the file for the measured rates of `num_ranks` ranks here; None without a folder."""
    if calibrations is None:
        return None
    machine = machine_name(Cluster(device=CPU, devices_per_node=num_ranks))
    return cpu_rates_path(calibrations, machine, ranks=num_ranks, threads=threads or threads_per_rank(num_ranks))


def threads_per_rank(num_ranks: int) -> int:
    """Return how many threads the launcher gives each rank on this machine, unless OMP_NUM_THREADS is set."""
    return max(1, usable_cores() // num_ranks)


def with_cpu_rates(cluster: Cluster, rates: CpuRates, *, keeps_links: bool = False) -> Cluster:
    """Return the cluster with the rates of its ranks as measured, all ranks at once."""
    flops, moved = Flops(rates.matmul_gflops * 1e9), rates.elementwise_gb_per_second * 1e9
    device = replace(
        cluster.device,
        peak_flops={"fp32": flops},
        reached={"fp32": flops, "memory": moved},
        memory_bandwidth=rates.update_gb_per_second * 1e9,
        cpu_rates=rates,
        note="measured here, all ranks at once",
    )
    cluster = replace(cluster, device=device)
    if not rates.all_reduce_us or keeps_links or cluster.devices_per_node == 1:
        return cluster
    # The cost model counts 2 (n - 1) hops of an all-reduce, each 0.65 of an all-gather's.
    hop = Seconds(rates.all_reduce_us * 1e-6 / (1.3 * (cluster.devices_per_node - 1)))
    bandwidth = rates.all_reduce_gb_per_second * 1e9
    device = replace(device, link_bandwidth=bandwidth)
    near = replace(default_links(device, 1, cluster.devices_per_node)[0], latency=max(hop, MIN_GLOO_LATENCY_SECONDS))
    return replace(cluster, device=device, links=(near,))


def cpu_flops(threads: int = 1) -> Flops:
    """Return a quick estimate of the float32 matmul rate of `threads` cores that do not slow each other down."""
    return Flops(_core_flops() * threads)


@functools.cache
def _core_flops() -> float:
    """Return the rate of one core, however many threads NumPy's BLAS uses.

    Threads cannot be counted or limited from here without the environment. But OpenBLAS runs a matmul of up to 2**18
    multiplications on one thread, and a batch of 64 x 64 matmuls reaches 0.9 or more of the rate of a large one.
    The best of several tries is the one without an interruption.
    """
    import numpy as np  # noqa: PLC0415  (takes a tenth of a second, and only a CPU run needs it)

    left = np.full((NUM_MATMULS, MATMUL_WIDTH, MATMUL_WIDTH), 0.5, dtype=np.float32)
    right, out = left[0].copy(), np.empty_like(left)
    best = float("inf")
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2.0 * MATMUL_WIDTH**3 * NUM_MATMULS / best


def machine_name(cluster: Cluster) -> str:
    """Return the file name of this machine's calibration. Equal machines share it, so a cluster needs one file.

    For GPUs the name has no count, because a rank may see any number of them. Cores are counted: ranks share them.
    """
    if not cluster.device.traits.shares_cores:
        return _file_name(cluster.device.name)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    if not model:  # Arm has numbers instead of names
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        numbers = [fields[name] for name in fields if name.strip() in ("CPU implementer", "CPU part")]
        model = "".join(numbers)
    return _file_name(f"cpu {model} {num_cores()} cores")


def gpu_device(gpus: Sequence[tuple[str, float]]) -> Device:
    """Return the device that represents all `gpus`, pairs of the driver's name and MiB: the smallest of them."""
    name, mebibytes = min(gpus, key=lambda gpu: gpu[1])
    memory = Bytes(int(mebibytes * 2**20 * (1 - DRIVER_FRACTION)))
    words = set(re.split(r"[\s_-]+", name.upper()))
    family = [each for each in DEVICES.values() if each.traits.has_data_sheet and model_words(each) <= words]
    if not family:
        return replace(
            UNKNOWN_GPU, name=name, memory_bytes=memory, note="not in the catalogue, so its rates are a guess"
        )
    nearest = min(family, key=lambda each: (-len(model_words(each)), abs(each.memory_bytes - memory)))
    link = nearest.pcie_bandwidth if "PCIE" in words else nearest.link_bandwidth
    note = f"{nearest.note}; the node mixes devices" if len(set(gpus)) > 1 else nearest.note
    return replace(nearest, memory_bytes=memory, link_bandwidth=link, note=note)


def num_cores() -> int:
    """Return the cores this process may use. Two hyper-threads count as one: a matmul gains nothing from them."""
    allowed = usable_cores()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def usable_cores() -> int:
    """Return the cores this process may use, hyper-threads included."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_gpu_links(device: Device, num_gpus: int, visible: str | None) -> tuple[Link, ...]:
    """Return the links between the visible GPUs; empty if the driver does not say: then the device's link counts."""
    matrix = parse_topology(run_driver_tool(TOPOLOGY_MATRIX)) if num_gpus > 1 else None
    if matrix is None:
        return ()
    chosen = (
        list(range(len(matrix))) if visible is None else [int(each) for each in visible.split(",") if each.isdigit()]
    )
    if len(chosen) != num_gpus or max(chosen) >= len(matrix):
        return ()  # chosen by UUID, or a container that counts differently
    return gpu_links([[matrix[row][column] for column in chosen] for row in chosen], device)


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")

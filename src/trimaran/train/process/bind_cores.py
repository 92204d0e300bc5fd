"""Binds a rank to the cores near its GPU: memory of another NUMA node is slower to read and to copy from."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.host_limits import SYS, cores_near, numa_node_of, pci_device


def bind_cores(device: torch.device) -> dict[str, int]:
    """Bind all threads of this process to the NUMA node of its GPU. Returns what was bound, for the `start` event.

    Call it before threads and loader processes are started: they inherit it. A process that is already bound to one
    NUMA node stays as it is, and so does a machine with only one.
    """
    if DEVICE_TRAITS[device.type].shares_cores or not hasattr(os, "sched_setaffinity"):
        return {}
    return bind_near(pci_device(_pci_bus(device)))


def bind_near(folder: Path, *, sys: Path = SYS) -> dict[str, int]:
    """Bind this process to the NUMA node of a device, given its folder in sysfs."""
    cores = cores_near(folder, os.sched_getaffinity(0), sys)
    if not cores:
        return {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
    return {"numa_node": numa_node_of(folder), "cores": len(cores)}


def _pci_bus(device: torch.device) -> str:
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

"""The NUMA nodes of this machine: their cores, and the node that a device is attached to, from sysfs."""

import contextlib
import re
from collections.abc import Set
from pathlib import Path

SYS = Path("/sys")
UNKNOWN_NODE = -1


def numa_nodes(sys: Path = SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node; empty if Linux does not say."""
    folders = sys.glob("devices/system/node/node[0-9]*")
    return {int(folder.name[4:]): frozenset(parse_cores(_read(folder / "cpulist"))) for folder in folders}


def numa_node_of(device: Path) -> int:
    """Return the NUMA node of a device, given its folder in sysfs; UNKNOWN_NODE if it has none."""
    text = _read(device / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else UNKNOWN_NODE


def pci_device(bus: str, sys: Path = SYS) -> Path:
    """Return the folder of a PCI device. nvidia-smi writes `00000000:01:00.0`, sysfs `0000:01:00.0`."""
    return sys / "bus/pci/devices" / bus[-12:].lower()


def cores_near(device: Path, allowed: Set[int], sys: Path = SYS) -> frozenset[int]:
    """Return those of the allowed cores that are on the NUMA node of a device; empty if there is nothing to choose.

    There is nothing to choose if the device's node is not known or has no allowed core, or if all allowed cores are on
    one node: the machine has no other, or somebody has bound this process already.
    """
    nodes = numa_nodes(sys)
    if sum(bool(cores & allowed) for cores in nodes.values()) < 2:
        return frozenset()
    return nodes.get(numa_node_of(device), frozenset()) & allowed


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        with contextlib.suppress(ValueError):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""The links between the GPUs of this machine and its network cards, from nvidia-smi and sysfs."""

import re
from collections.abc import Sequence
from pathlib import Path

from trimaran.core import Seconds
from trimaran.machine.cluster import LATENCY_SECONDS, Link
from trimaran.machine.device_catalogue import Device

Matrix = Sequence[Sequence[str]]

# Bytes a second of one NVLink in one direction. NVLink 2 to 4 have 25e9, Blackwell twice that, the GA102 bridges less.
NVLINK_BANDWIDTH = {
    "B200": 50e9, "B300": 50e9, "GB200": 50e9, "GB300": 50e9, "RTX3090": 14e9, "RTX-A6000": 14e9, "A40": 14e9,
}  # fmt: skip
DEFAULT_NVLINK_BANDWIDTH = 25e9
SOCKET_BANDWIDTH = 20.8e9  # one UPI link at 10.4 GT/s in one direction, between the two sockets of a host
IN_HOST = {"PIX", "PXB", "PHB", "NODE"}  # through PCIe switches or the host bridges of one socket
PORT_RATE = re.compile(r"([\d.]+) Gb/sec")


def parse_topology(text: str) -> Matrix | None:
    """Return the connection between each pair of GPUs, from `nvidia-smi topo -m`; None if it shows no GPUs.

    `NV12` means twelve NVLinks; `PIX` to `SYS` are paths over PCIe, from short to long; `X` is the GPU itself.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined, even in a pipe
    rows = [
        line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV\d+|PIX|PXB|PHB|NODE|SYS)\s", line)
    ]
    names = [row[0] for row in rows]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    square = all(len(row) == len(rows) and row[place] == "X" for place, row in enumerate(matrix))
    return matrix if names and square else None


def gpu_links(matrix: Matrix, device: Device) -> tuple[Link, ...]:
    """Return the links between the GPUs of a node: NVLink, then PCIe, then the bus between sockets.

    A link connects blocks of neighbouring GPUs of equal size, because ranks are numbered in this order: pairs 0-1 and
    2-3 count, pairs 0-2 and 1-3 do not.
    """
    connections = {"NVLink": {"NV"}, "PCIe": {"NV", *IN_HOST}, "sockets": {"NV", *IN_HOST, "SYS"}}
    links: list[Link] = []
    for name, kinds in connections.items():
        size = _block_size(matrix, kinds)
        if size > (links[-1].devices if links else 1):
            rate = {"PCIe": device.pcie_bandwidth, "sockets": min(device.pcie_bandwidth, SOCKET_BANDWIDTH)}.get(name)
            bandwidth = rate or _nvlink_bandwidth(matrix, device, size)
            links.append(Link(name=name, devices=size, bandwidth=bandwidth, latency=Seconds(LATENCY_SECONDS[name])))
    return tuple(links)


def read_network(sys: Path = Path("/sys")) -> float:
    """Return the bytes a second, in one direction, of this machine's network cards; 0 if sysfs does not say.

    NCCL uses all InfiniBand and RoCE cards, so their rates add up. Of plain Ethernet cards only the fastest counts.
    """
    ports = [port for port in sys.glob("class/infiniband/*/ports/*") if "ACTIVE" in _read(port / "state")]
    rates = [float(match[1]) for port in ports if (match := PORT_RATE.match(_read(port / "rate")))]
    if rates:
        return sum(rates) * 1e9 / 8
    cards = [
        card for card in sys.glob("class/net/*") if (card / "device").exists() and _read(card / "operstate") == "up"
    ]
    speeds = [int(speed) for card in cards if (speed := _read(card / "speed")).isdigit()]
    return max(speeds, default=0) * 1e6 / 8


def _block_size(matrix: Matrix, kinds: set[str]) -> int:
    """Return the largest block size at which these kinds of connection connect every block."""
    count = len(matrix)
    sizes = (size for size in range(count, 0, -1) if count % size == 0)
    return next(
        size for size in sizes if all(_connected(matrix, kinds, start, size) for start in range(0, count, size))
    )


def _connected(matrix: Matrix, kinds: set[str], start: int, size: int) -> bool:
    """Return whether every GPU of the block can be reached from its first."""
    seen, pending = {start}, [start]
    while pending:
        here = pending.pop()
        near = {each for each in range(start, start + size) if _kind(matrix[here][each]) in kinds} - seen
        seen |= near
        pending += near
    return len(seen) == size


def _nvlink_bandwidth(matrix: Matrix, device: Device, size: int) -> float:
    """Return the bandwidth of a GPU over all of its NVLinks.

    Behind a switch, nvidia-smi shows every peer with all links of the GPU, so the device's own bandwidth is the cap.
    """
    num_links = min(sum(int(entry[2:]) for entry in row[:size] if entry.startswith("NV")) for row in matrix[:size])
    total = num_links * NVLINK_BANDWIDTH.get(device.name, DEFAULT_NVLINK_BANDWIDTH)
    return min(total, device.link_bandwidth) if device.link_bandwidth > device.pcie_bandwidth else total


def _kind(entry: str) -> str:
    return "NV" if entry.startswith("NV") else entry


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""

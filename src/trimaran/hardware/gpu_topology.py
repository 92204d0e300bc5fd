"""How the GPUs of this machine are wired, and what leads out of it: read from the driver's tool and from Linux."""

import re
from collections.abc import Sequence
from pathlib import Path

from trimaran.core import Seconds
from trimaran.hardware.cluster import LATENCY, Link
from trimaran.hardware.device_catalogue import Device

Matrix = Sequence[Sequence[str]]

# Bytes a second of one NVLink, one way: NVLink 2 to 4 have 25e9, Blackwell's twice that, the bridges of GA102 less.
LANE = {"B200": 50e9, "B300": 50e9, "GB200": 50e9, "RTX3090": 14e9, "RTX-A6000": 14e9, "A40": 14e9}
USUAL_LANE = 25e9
SOCKET_BANDWIDTH = 20.8e9  # one UPI link at 10.4 GT/s, one way: what leads from one socket of a host to the other
IN_HOST = {"PIX", "PXB", "PHB", "NODE"}  # through PCIe switches, or the host bridges of one socket
RATE = re.compile(r"([\d.]+) Gb/sec")


def parse_topology(text: str) -> Matrix | None:
    """Return what joins each GPU to each, from the answer of `nvidia-smi topo -m`; None where it shows no GPUs.

    `NV12` are twelve NVLinks, `PIX` to `SYS` ways over PCIe, the later the longer, `X` the GPU itself.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined, even in a pipe
    rows = [
        line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV\d+|PIX|PXB|PHB|NODE|SYS)\s", line)
    ]
    names = [row[0] for row in rows]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    square = all(len(row) == len(rows) and row[place] == "X" for place, row in enumerate(matrix))
    return matrix if names and square else None


def links_of(matrix: Matrix, device: Device) -> tuple[Link, ...]:
    """Return the ways between the GPUs of a node, from NVLink over PCIe to the bus between sockets.

    A link joins blocks of neighbours of equal size, because ranks are numbered in this order: pairs 0-1 and 2-3 count,
    pairs 0-2 and 1-3 do not.
    """
    reach = {"NVLink": {"NV"}, "PCIe": {"NV", *IN_HOST}, "sockets": {"NV", *IN_HOST, "SYS"}}
    links: list[Link] = []
    for name, ways in reach.items():
        size = _block_size(matrix, ways)
        if size > (links[-1].devices if links else 1):
            rate = {"PCIe": device.pcie_bandwidth, "sockets": min(device.pcie_bandwidth, SOCKET_BANDWIDTH)}.get(name)
            bandwidth = rate or _nvlink_bandwidth(matrix, device, size)
            links.append(Link(name=name, devices=size, bandwidth=bandwidth, latency=Seconds(LATENCY[name])))
    return tuple(links)


def read_network(sys: Path = Path("/sys")) -> float:
    """Return the bytes a second, one way, of all cards that lead out of this machine; 0 where Linux does not say.

    InfiniBand and RoCE cards work together, so their rates add up. Of plain Ethernet one card carries the traffic.
    """
    ports = [port for port in sys.glob("class/infiniband/*/ports/*") if "ACTIVE" in _read(port / "state")]
    rates = [float(match[1]) for port in ports if (match := RATE.match(_read(port / "rate")))]
    if rates:
        return sum(rates) * 1e9 / 8
    cards = [
        card for card in sys.glob("class/net/*") if (card / "device").exists() and _read(card / "operstate") == "up"
    ]
    speeds = [int(speed) for card in cards if (speed := _read(card / "speed")).isdigit()]
    return max(speeds, default=0) * 1e6 / 8


def _block_size(matrix: Matrix, ways: set[str]) -> int:
    """Return how many neighbours these ways join: the largest size of which every block hangs together."""
    count = len(matrix)
    sizes = (size for size in range(count, 0, -1) if count % size == 0)
    return next(size for size in sizes if all(_joined(matrix, ways, start, size) for start in range(0, count, size)))


def _joined(matrix: Matrix, ways: set[str], start: int, size: int) -> bool:
    """Return whether every GPU of the block can be reached from its first."""
    seen, fresh = {start}, [start]
    while fresh:
        here = fresh.pop()
        near = {each for each in range(start, start + size) if _way(matrix[here][each]) in ways} - seen
        seen |= near
        fresh += near
    return len(seen) == size


def _nvlink_bandwidth(matrix: Matrix, device: Device, size: int) -> float:
    """Return what a GPU sends over all of its NVLinks.

    Behind a switch each peer is shown with all links of the GPU, so the sum stops at what the device has.
    """
    lanes = min(sum(int(way[2:]) for way in row[:size] if way.startswith("NV")) for row in matrix[:size])
    total = lanes * LANE.get(device.name, USUAL_LANE)
    return min(total, device.link_bandwidth) if device.link_bandwidth > device.pcie_bandwidth else total


def _way(entry: str) -> str:
    return "NV" if entry.startswith("NV") else entry


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""

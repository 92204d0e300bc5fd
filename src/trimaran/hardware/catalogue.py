"""What a device is, on paper: the catalogue, and how people spell its names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimaran.core import GIB, Bytes, Flops, UserError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU rank. Bandwidths are bytes a second, one way, of one device.

    `memory_bytes` is what a process can see, not what the box says. `peak_flops` is dense arithmetic by precision,
    `achievable` the share of it that the best matrix product reaches. `link_bandwidth` goes to a neighbour in the
    node, `network_bandwidth` to another node. `node_size` is how many share a node unless a person says otherwise.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: Bytes
    peak_flops: Mapping[str, Flops]
    achievable: float
    memory_bandwidth: float
    link_bandwidth: float
    pcie_bandwidth: float
    network_bandwidth: float
    node_size: int = 8
    note: str = ""

    def peak(self, precision: str) -> Flops:
        """Return the data sheet's rate; a precision the device lacks runs at the rate of fp32."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    def achievable_flops(self, precision: str) -> Flops:
        return Flops(self.peak(precision) * self.achievable)


# Memory is what torch reports. `best` is the best measured bf16 product (MAMF, stas00/ml-engineering); where none is
# published we assume 0.75 of the peak. fp32 is without TF32, as torch starts. Bridges between pairs (H100 PCIe) do
# not carry a ring over the node, so those devices meet over PCIe. NIC is a typical node's cards divided by its devices:
# a guess that a cluster file replaces.
# fmt: off
_GPUS = (
    # name         GiB   fp32   bf16   fp8   best   HBM  link  PCIe  NIC   node      (TFLOP/s and GB/s)
    ("V100-16GB",   15.8,  15.7,    0,    0,    0,   900,  150,  16,  1.6,   8),
    ("V100-32GB",   31.7,  15.7,    0,    0,    0,   900,  150,  16,  1.6,   8),
    ("A100-40GB",   39.4,  19.5,  312,    0,  271,  1555,  300,  31, 12.5,   8),
    ("A100-80GB",   79.2,  19.5,  312,    0,  271,  2000,  300,  31,   25,   8),
    ("H100",        79.1,    67,  989, 1979,  795,  3350,  450,  63,   50,   8),
    ("H100-PCIe",   79.1,    51,  756, 1513,    0,  2000,   63,  63,   25,   8),
    ("H200",       139.8,    67,  989, 1979,  795,  4800,  450,  63,   50,   8),
    ("B200",       178.3,    75, 2250, 4500, 1745,  8000,  900,  63,   50,   8),
    ("GB200",      184.3,    80, 2500, 5000, 1822,  8000,  900, 450,   50,  72),
    ("RTX4090",     23.6,  82.6,  165,  330,    0,  1008,   31,  31, 1.25,   8),
    ("L40S",        44.5,  91.6,  362,  733,    0,   864,   31,  31, 6.25,   8),
    ("MI300X",     191.7, 163.4, 1307, 2610,  668,  5300,  448,  63,   50,   8),
)
# fmt: on

# One core of a recent server. `hardware.detect` puts this machine's memory and rate in place of the nominal ones.
# memory_bandwidth: what one core streams through torch's allocator; link_bandwidth: gloo over loopback.
CPU = Device(
    name="cpu",
    kind="cpu",
    memory_bytes=Bytes(4 * GIB),
    peak_flops={"fp32": Flops(100e9)},
    achievable=1.0,
    memory_bandwidth=16e9,
    link_bandwidth=1.3e9,
    pcie_bandwidth=1.3e9,
    network_bandwidth=1e9,
    note="a nominal core",
)


def _gpu(row: tuple[str, float, float, float, float, float, float, float, float, float, int]) -> Device:
    name, gib, fp32, bf16, fp8, best, hbm, link, pcie, nic, node_size = row
    rates = {"fp32": fp32, "bf16": bf16, "fp8": fp8}
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=Bytes(int(gib * GIB)),
        peak_flops={precision: Flops(rate * 1e12) for precision, rate in rates.items() if rate},
        achievable=best / bf16 if best else 0.75,
        memory_bandwidth=hbm * 1e9,
        link_bandwidth=link * 1e9,
        pcie_bandwidth=pcie * 1e9,
        network_bandwidth=nic * 1e9,
        node_size=node_size,
        note="rates of the catalogue" if best else "peak rates of the catalogue, of which 0.75 is assumed",
    )


DEVICES: dict[str, Device] = {row[0]: _gpu(row) for row in _GPUS} | {"cpu": CPU}

_ALIASES = {
    "v100": "V100-32GB",
    "v10016": "V100-16GB",
    "v10032": "V100-32GB",
    "a100": "A100-80GB",
    "a10040": "A100-40GB",
    "a10080": "A100-80GB",
    "h10080gb": "H100",
    "h100sxm": "H100",
    "h200sxm": "H200",
    "4090": "RTX4090",
}


def find_device(name: str) -> Device:
    """Return the device of the catalogue that `name` means, however it is spelt: `a100-80gb`, `A100`, `rtx 4090`."""
    spelt = _squeeze(name)
    known = {_squeeze(each): each for each in DEVICES} | _ALIASES
    if spelt not in known:
        raise UserError("C001", f"there is no device '{name}' in the catalogue{nearest(name, DEVICES)}",
                        where="cluster", fix=f"use one of {', '.join(DEVICES)}")  # fmt: skip
    return DEVICES[known[spelt]]


def _squeeze(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())

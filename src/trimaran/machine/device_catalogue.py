"""The device catalogue: data sheet rates, and how users and drivers spell the names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trimaran.core import DEVICE_TRAITS, GIB, Bytes, DeviceTraits, Flops, Seconds, UserError, did_you_mean
from trimaran.machine.cpu_rates import CpuRates

# Fraction of the peak that the best matmul reaches, for devices without a measurement. The measured devices below
# reach 0.73 to 0.87 (NVIDIA) and 0.51 to 0.60 (AMD).
ASSUMED_MATMUL_FRACTION = {"NVIDIA": 0.75, "AMD": 0.55}
# Fraction of the memory bandwidth that a large elementwise operator reaches, without a measurement.
STREAM_FRACTION = {"cuda": 0.85, "cpu": 0.7}
# Host time to start one small operator of torch, which measures how fast a host is: `add_us` on the host of an H200
# (benchmarks/h200_kernels.json), where the host overheads of the cost model were measured.
HOST_LAUNCH_SECONDS = Seconds(7e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU rank. Bandwidths are bytes a second per device in one direction."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: Bytes  # that a process can see, not the nominal size
    peak_flops: Mapping[str, Flops] = field(hash=False)  # dense arithmetic, by precision
    achievable: float  # the fraction of it that the best matmul reaches
    # Measured: flops by precision, bytes a second of `memory`, and seconds of one `launch`.
    reached: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_bandwidth: float
    link_bandwidth: float  # to a neighbour in the node
    pcie_bandwidth: float  # to the host
    network_bandwidth: float  # to another node
    node_size: int = 8  # how many devices a node has by default
    note: str = ""
    cpu_rates: CpuRates | None = None  # measured on this machine
    # Factors on what the cost model would say, fitted to runs: on the speed of matmuls and attention, by precision, and
    # on the time of `host`.
    fitted: tuple[tuple[str, float], ...] = ()

    @property
    def traits(self) -> DeviceTraits:
        """What follows from the device's kind."""
        return DEVICE_TRAITS[self.kind]

    @property
    def no_peak(self) -> str:
        """Why `peak_flops` is not a data sheet's, so that no MFU can be given; empty if it is."""
        if not self.traits.has_data_sheet:
            return "the peak of this CPU is not known: there is no data sheet of it here"
        return "" if self.name in DEVICES else "this GPU is not in the catalogue, so its peak is not known"

    def peak(self, precision: str) -> Flops:
        """Return the data sheet's rate; a precision that the device lacks runs at the fp32 rate."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    def achievable_flops(self, precision: str) -> Flops:
        """Return the rate of the best matmul: measured, or a fraction of the peak."""
        supported = precision if precision in self.peak_flops else "fp32"
        return Flops(self.reached.get(supported, self.peak(supported) * self.achievable))

    @property
    def launch_seconds(self) -> Seconds:
        """Host time to start one small operator."""
        return Seconds(self.reached.get("launch", HOST_LAUNCH_SECONDS) * self.factor("host"))

    def factor(self, name: str) -> float:
        """Return the fitted factor of that name; 1 if nothing was fitted."""
        return next((factor for each, factor in self.fitted if each == name), 1.0)

    @property
    def stream_bandwidth(self) -> float:
        """Bytes a second that a large elementwise operator moves: measured, or the usual fraction of the data sheet."""
        return self.reached.get("memory", self.memory_bandwidth * STREAM_FRACTION[self.kind])


# Rates are dense, from the makers' data sheets and architecture papers. fp32 is without TF32, which is torch's default.
# Half precision accumulates in fp32 (half the rate on GeForce). Memory is what torch reports, or 0.99 of the nominal
# size where we have no report. `best` are the best measured bf16 and fp8 matmuls (MAMF, stas00/ml-engineering; A800,
# H800 and GH200 have the die of A100 and H100; fp8 of MI300X: Azure/AI-benchmarking-guide, hipBLASLt). GB300: NVIDIA's
# figures for a rack (180 and 360 PFLOP/s in bf16 and fp8, 576 TB/s) divided by 72, and 279 GB. Bridges between pairs of
# cards do not carry a ring over the node, so such cards communicate over PCIe here; `auto` and a cluster file know the
# pairs. NIC is the bandwidth of a typical node's network cards divided by its devices: a guess that a cluster file
# replaces.
# fmt: off
_GPUS = (
    # name            GiB   fp32   half   fp8   best (bf16, fp8)  HBM  link  PCIe   NIC  node   (TFLOP/s and GB/s)
    ("V100-16GB",    15.8,  15.7,   125,    0,    0,    0,   900,  150,   16,  1.6,    8),
    ("V100-32GB",    31.7,  15.7,   125,    0,    0,    0,   900,  150,   16,  1.6,    8),
    ("T4",           14.7,   8.1,    65,    0,    0,    0,   320,   16,   16,  1.6,    4),
    ("A100-40GB",    39.4,  19.5,   312,    0,  271,    0,  1555,  300,   31, 12.5,    8),
    ("A100-80GB",    79.2,  19.5,   312,    0,  271,    0,  2039,  300,   31,   25,    8),
    ("A100-PCIe-40GB", 39.4, 19.5,  312,    0,  253,    0,  1555,   31,   31, 12.5,    8),
    ("A100-PCIe-80GB", 79.2, 19.5,  312,    0,  253,    0,  1935,   31,   31, 12.5,    8),
    ("A800-80GB",    79.2,  19.5,   312,    0,  271,    0,  2039,  200,   31,   25,    8),
    ("A10",          22.5,  31.2,   125,    0,    0,    0,   600,   31,   31, 3.12,    4),
    ("A10G",         22.1,    35,    70,    0,    0,    0,   600,   31,   31, 3.12,    8),
    ("A30",          23.6,  10.3,   165,    0,    0,    0,   933,   31,   31, 6.25,    4),
    ("A40",          44.4,  37.4, 149.7,    0,    0,    0,   696,   31,   31, 6.25,    8),
    ("RTX-A6000",    47.5,  38.7, 154.8,    0,    0,    0,   768,   31,   31, 1.25,    4),
    ("RTX3090",      23.7,  35.6,    71,    0,    0,    0,   936,   31,   31, 1.25,    8),
    ("RTX4090",      23.6,  82.6,   165,  330,    0,    0,  1008,   31,   31, 1.25,    8),
    ("RTX5090",      31.4, 104.8, 209.5,  419,    0,    0,  1792,   63,   63, 1.25,    8),
    ("RTX-6000-Ada", 47.4,  91.1, 364.2, 728.5,   0,    0,   960,   31,   31, 1.25,    4),
    ("RTX-PRO-6000", 95.0,   125, 503.8, 1007.6,  0,    0,  1792,   63,   63, 6.25,    8),
    ("L4",           22.2,  30.3,   121, 242.5,   0,    0,   300,   31,   31, 3.12,    8),
    ("L40",          44.5,  90.5,   181,  362,    0,    0,   864,   31,   31, 6.25,    8),
    ("L40S",         44.5,  91.6,   362,  733,    0,    0,   864,   31,   31, 6.25,    8),
    ("H20",          95.1,    44,   148,  296,    0,    0,  4000,  450,   63,   50,    8),
    ("H100",         79.1,    67,   989, 1979,  795, 1403,  3350,  450,   63,   50,    8),
    ("H100-96GB",    95.0,    67,   989, 1979,    0,    0,  2400,  450,   63,   50,    8),
    ("H100-PCIe",    79.1,    51,   756, 1513,    0,    0,  2000,   63,   63,   25,    8),
    ("H100-NVL",     93.1,    60,   835, 1671,    0,    0,  3900,   63,   63,   25,    8),
    ("H800",         79.1,    67,   989, 1979,  795, 1403,  3350,  200,   63,   50,    8),
    ("H200",        139.8,    67,   989, 1979,  795, 1453,  4800,  450,   63,   50,    8),
    ("GH200",        94.9,    67,   989, 1979,  795, 1403,  4000,  450,  450,   50,    1),
    ("B200",        178.3,    75,  2250, 4500, 1745, 3433,  8000,  900,   63,   50,    8),
    ("B300",        265.5,    75,  2250, 4500,    0,    0,  8000,  900,  126,  100,    8),
    ("GB200",       184.3,    80,  2500, 5000, 1822, 3616,  8000,  900,  450,   50,   72),
    ("GB300",       276.2,    80,  2500, 5000,    0,    0,  8000,  900,  450,  100,   72),
    ("MI300X",      191.7, 163.4,  1307, 2610,  668, 1159,  5300,  448,   63,   50,    8),
    ("MI325X",      255.7, 163.4,  1300, 2610,  785,    0,  6000,  448,   63,   50,    8),
    ("MI355X",      287.7, 157.3,  2516, 5033,    0,    0,  8000,  537,   63,   50,    8),
)
# fmt: on
# Measured bandwidth of a copy in GB/s, where it is not STREAM_FRACTION of the data sheet's: Azure/AI-benchmarking-guide
# (BabelStream, ND MI300X v5).
MEASURED_STREAM = {"MI300X": 4110}
WITHOUT_BF16 = {"V100-16GB", "V100-32GB", "T4"}  # Volta and Turing: their tensor cores support fp16 only

# One core of a recent server. `hardware.detect` replaces the nominal memory and rate with those of this machine.
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


def _gpu(row: tuple) -> Device:
    name, gib, fp32, half, fp8, best, best_fp8, hbm, link, pcie, nic, node_size = row
    rates = {"fp32": fp32, "fp16": half, "bf16": 0 if name in WITHOUT_BF16 else half, "fp8": fp8}
    assumed = ASSUMED_MATMUL_FRACTION["AMD" if name.startswith("MI") else "NVIDIA"]
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=Bytes(int(gib * GIB)),
        peak_flops={precision: Flops(rate * 1e12) for precision, rate in rates.items() if rate},
        achievable=best / half if best else assumed,
        reached=({"fp8": best_fp8 * 1e12} if best_fp8 else {})
        | ({"memory": MEASURED_STREAM[name] * 1e9} if name in MEASURED_STREAM else {}),
        memory_bandwidth=hbm * 1e9,
        link_bandwidth=link * 1e9,
        pcie_bandwidth=pcie * 1e9,
        network_bandwidth=nic * 1e9,
        node_size=node_size,
        note="the best published matmul rate" if best else f"{assumed} of the data sheet, assumed",
    )


DEVICES: dict[str, Device] = {row[0]: _gpu(row) for row in _GPUS} | {"cpu": CPU}

_ALIASES = {"3090": "RTX3090", "4090": "RTX4090", "5090": "RTX5090", "a6000": "RTX-A6000", "h10094gb": "H100-NVL"}
# Words that name the maker, the socket or the rack, not the device.
_NOISE = re.compile(
    r"nvidia|amd|geforce|tesla|instinct|sxm\d?|oam|hbm\d\w?|nvl\d\d|generation|blackwell", re.IGNORECASE
)
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)", re.IGNORECASE)


def find_device(name: str) -> Device:
    """Return the device that `name` means in any spelling (`a100_80gb`, `H100-SXM`); without a size, the largest."""
    words = [word for word in _words(name) if not _NOISE.fullmatch(word)]
    key = _squeeze("".join(words))
    by_key = {_squeeze(each): each for each in DEVICES} | _ALIASES
    if key in by_key:
        return DEVICES[by_key[key]]
    sizes = [float(match[1]) for word in words if (match := _MEMORY.fullmatch(word))]
    same = [each for each in DEVICES.values() if model_words(each) == {word.upper() for word in words} - _sizes(words)]
    if sizes:
        same = [each for each in same if abs(each.memory_bytes / GIB / sizes[0] - 1) < 0.1]
    if not same:
        raise UserError(
            "C001.no-device-catalogue",
            where="cluster",
            name=name,
            guess=did_you_mean(name, DEVICES),
            devices=", ".join(DEVICES),
        )
    return min(same, key=lambda each: abs(each.memory_bytes / GIB - (sizes[0] if sizes else 1e6)))


def model_words(device: Device) -> set[str]:
    """Return the words that a driver's name must contain: 4090 of `GeForce RTX 4090`, H100 and NVL of `H100 NVL`."""
    words = _words(device.name)
    return {word.upper().removeprefix("RTX") for word in words} - _sizes(words) - {""}


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-zA-Z0-9]+", name) if word]


def _sizes(words: list[str]) -> set[str]:
    return {word.upper() for word in words if _MEMORY.fullmatch(word)}


def _squeeze(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())

"""What is known of a machine, as values: checks read nothing, so that each can be asked about any machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.core import Bytes, Seconds
from trimaran.hardware import Cluster

Kind = Literal["cuda", "cpu"]
Version = tuple[int, ...]
Pair = tuple[int, int]
Round = Mapping[Pair, float | None]
"""Seconds by pair of nodes; None where the pair did not come to an end."""
NOTHING, NEVER = Bytes(0), Seconds(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What is installed; None or '' where it is not, or nobody could say.

    `torch_cuda` is the CUDA that torch was built with, `driver_cuda` the newest that the driver's library knows.
    """

    torch: str = ""
    torch_cuda: str = ""
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""
    arch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver's tool describes it; a number that it did not tell is None."""

    index: int
    name: str
    uuid: str = ""
    bus: str = ""
    memory: Bytes = NOTHING
    used: Bytes = NOTHING
    ecc: "Ecc | None" = None
    pace: "GpuClocks | None" = None
    compute_mode: str = ""
    mig: str = ""
    reset_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    """Errors in a GPU's memories since the driver was loaded, and rows that wait for a reset or could not be spared."""

    enabled: bool | None = None
    uncorrected: int = 0
    is_pending: bool = False
    is_worn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """What sets a GPU's speed: `brakes` are the driver's reasons for a lower clock, but for idleness."""

    brakes: tuple[str, ...] = ()
    power_limit: float | None = None
    default_power_limit: float | None = None
    clock: float | None = None
    default_clock: float | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A card that leads out of the machine; `numa` is -1 where Linux does not say."""

    name: str
    kind: Literal["infiniband", "ethernet"]
    is_up: bool
    gigabits: float = 0.0
    numa: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How devices are joined: `topology` and `peers` by pair of GPUs, `to_nics` the way of each GPU to each card."""

    topology: Sequence[Sequence[str]] = ()
    peers: Sequence[Sequence[str]] = ()
    to_nics: Sequence[Sequence[str]] = ()
    nics: tuple[Nic, ...] = ()
    gpu_numa: tuple[int, ...] = ()
    own_numa: frozenset[int] = frozenset()
    interfaces: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The machine around the devices. A limit of None has no end; `quota` are the cores that a container may use."""

    cores: int
    memory_free: Bytes
    load: float = 0.0
    quota: float | None = None
    shm: Bytes | None = None
    shm_free: Bytes | None = None
    nofile: int | None = None
    memlock: int | None = None
    core: int | None = 0
    core_pattern: str = ""
    loopback: str = ""
    clock: Seconds = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The disk that runs lie on. `trouble` is what writing a file there said; `bandwidth` is bytes a second, synced."""

    path: Path
    free: Bytes
    total: Bytes
    inodes: int | None = None
    trouble: str = ""
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a recipe asks of the machine. `refusal` is why no plan could be made of it: the rest is then unknown.

    `device_bytes` is what one device must have, `error` the relative half-width around it, `every` and
    `interval` the steps and the seconds between two checkpoints.
    """

    kind: Kind = "cpu"
    ranks: int = 1
    nodes: int = 1
    device_bytes: Bytes = NOTHING
    error: float = 0.0
    checkpoint_bytes: Bytes = NOTHING
    disk_bytes: Bytes = NOTHING
    every: int = 0
    interval: Seconds | None = None
    ports: tuple[int, ...] = ()
    refusal: str = ""
    remedy: str = ""

    @property
    def ranks_here(self) -> int:
        """Ranks of one node."""
        return max(1, self.ranks // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurements:
    """What the probe saw with torch. `missing` is why it saw nothing.

    `products` are flops a second by device, `failures` what went wrong on others, `reduce` the answer about sums,
    `archs` what torch has kernels for, `capabilities` what the devices are.
    """

    missing: str = ""
    products: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    reduce: Mapping[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """What several nodes found out about each other, or why not (`missing`). Node 0's clock is the measure."""

    names: tuple[str, ...]
    rounds: tuple[Round, ...] = ()
    skews: Mapping[int, float] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine, as far as somebody looked. What is None was not looked at, and its checks are skipped."""

    environment: Mapping[str, str]
    versions: Versions
    gpus: tuple[Gpu, ...] = ()
    wiring: Wiring | None = None
    host: HostFacts
    disk: DiskFacts | None = None
    work: Work | None = None
    measured: MachineMeasurements | None = None
    cluster: Cluster | None = None
    fleet: NodeMeasurements | None = None


def version_of(text: str) -> Version:
    """Return `2.13.0+cpu` as (2, 13, 0); what is not a number ends it."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)

"""What is known of a machine, as values. Checks read only these, so tests can describe any machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.core import Bytes, Seconds
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.cluster import Cluster

Kind = Literal["cuda", "cpu"]
Version = tuple[int, ...]
Pair = tuple[int, int]
PairSeconds = Mapping[Pair, float | None]
"""Seconds by pair of nodes; None if the pair did not finish."""
ZERO_BYTES, ZERO_SECONDS = Bytes(0), Seconds(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Installed versions; '' if not installed or unknown.

    `torch_cuda` is the CUDA that torch was built with, `driver_cuda` the newest that the driver supports.
    """

    torch: str = ""
    torch_cuda: str = ""
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""
    arch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi describes it; a value that it did not report is None."""

    index: int
    name: str
    uuid: str = ""
    bus: str = ""
    memory: Bytes = ZERO_BYTES
    used: Bytes = ZERO_BYTES
    ecc: "Ecc | None" = None
    clocks: "GpuClocks | None" = None
    compute_mode: str = ""
    mig: str = ""
    reset_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ecc:
    """Uncorrected memory errors of a GPU since the driver was loaded, and the state of its spare rows."""

    enabled: bool | None = None
    uncorrected: int = 0
    reset_pending: bool = False
    spare_rows_exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """What limits a GPU's speed. `throttle_reasons` are the driver's, without idle."""

    throttle_reasons: tuple[str, ...] = ()
    power_limit: float | None = None
    default_power_limit: float | None = None
    clock: float | None = None
    default_clock: float | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card; `numa` is -1 if Linux does not report its node."""

    name: str
    kind: Literal["infiniband", "ethernet"]
    is_up: bool
    gigabits: float = 0.0
    numa: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """How devices are connected: `topology` and `peers` by pair of GPUs, `gpu_nic_paths` by GPU and network card.

    `allowed_numa` are the NUMA nodes whose cores this process may use.
    """

    topology: Sequence[Sequence[str]] = ()
    peers: Sequence[Sequence[str]] = ()
    gpu_nic_paths: Sequence[Sequence[str]] = ()
    nics: tuple[Nic, ...] = ()
    gpu_numa: tuple[int, ...] = ()
    allowed_numa: frozenset[int] = frozenset()
    interfaces: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The host. A limit of None means unlimited; `quota` is the container's CPU quota in cores.

    `nofile` is the hard limit of open files: a run raises its soft limit to it.
    """

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
    clock: Seconds = ZERO_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Further ulimits; None means unlimited. `processes` is how many threads this user may still start."""

    processes: int | None = None
    address_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The disk for runs. `write_error` is the error of a test write; `bandwidth` is bytes per second with fsync."""

    path: Path
    free: Bytes
    total: Bytes
    inodes: int | None = None
    write_error: str = ""
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequirements:
    """What a recipe needs from the machine. `refusal` is why no plan exists; the rest is unknown then.

    `device_bytes` is the predicted memory of one device and `error` its relative half-width. `every` and `interval`
    are the steps and the seconds between two checkpoints.
    """

    kind: Kind = "cpu"
    ranks: int = 1
    nodes: int = 1
    device_bytes: Bytes = ZERO_BYTES
    error: float = 0.0
    checkpoint_bytes: Bytes = ZERO_BYTES
    disk_bytes: Bytes = ZERO_BYTES
    every: int = 0
    interval: Seconds | None = None
    ports: tuple[int, ...] = ()
    refusal: str = ""
    remedy: str = ""

    @property
    def needs_gpus(self) -> bool:
        return not DEVICE_TRAITS[self.kind].shares_cores

    @property
    def ranks_here(self) -> int:
        """Ranks per node."""
        return max(1, self.ranks // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurements:
    """What the probe process measured with torch. `missing` is why it measured nothing.

    `matmul_flops` is FLOP/s by device, `failures` the errors by device, `all_reduce` the probe's answer about it,
    `archs` the architectures torch has kernels for, `capabilities` those of the devices.
    """

    missing: str = ""
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    all_reduce: Mapping[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """Pair times and clock skews between nodes, or why there are none (`missing`). Skews are relative to node 0."""

    names: tuple[str, ...]
    rounds: tuple[PairSeconds, ...] = ()
    skews: Mapping[int, float] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine. A field that is None was not read, and its checks are skipped."""

    environment: Mapping[str, str]
    versions: Versions
    gpus: tuple[Gpu, ...] = ()
    interconnect: Interconnect | None = None
    host: HostFacts
    limits: ProcessLimits = ProcessLimits()
    disk: DiskFacts | None = None
    requirements: RunRequirements | None = None
    measured: MachineMeasurements | None = None
    cluster: Cluster | None = None
    node_measurements: NodeMeasurements | None = None


def version_of(text: str) -> Version:
    """Return `2.13.0+cpu` as (2, 13, 0); stop at the first part that is not a number."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)

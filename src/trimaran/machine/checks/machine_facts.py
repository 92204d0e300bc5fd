"""What is known of a machine, as values, and what a check says about it. Tests can describe any machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimaran.core import DEVICE_TRAITS, Bytes, Seconds
from trimaran.machine.cluster import Cluster
from trimaran.machine.gpus import Gpu, Nic

Kind = Literal["cuda", "cpu"]
Version = tuple[int, ...]
Pair = tuple[int, int]
PairSeconds = Mapping[Pair, float | None]
"""Seconds by pair of nodes; None if the pair did not finish."""
ZERO_BYTES, ZERO_SECONDS = Bytes(0), Seconds(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Installed versions; '' if not installed or unknown."""

    torch: str = ""
    torch_cuda: str = ""  # that torch was built with
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""  # the newest that the driver supports
    arch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """How devices are connected."""

    topology: Sequence[Sequence[str]] = ()  # by pair of GPUs, as `peers`
    peers: Sequence[Sequence[str]] = ()
    gpu_nic_paths: Sequence[Sequence[str]] = ()  # by GPU and network card
    nics: tuple[Nic, ...] = ()
    gpu_numa: tuple[int, ...] = ()
    allowed_numa: frozenset[int] = frozenset()  # NUMA nodes whose cores this process may use
    interfaces: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The host. A limit of None means unlimited."""

    cores: int
    memory_free: Bytes
    load: float = 0.0
    quota: float | None = None  # the container's CPU quota, in cores
    shm: Bytes | None = None
    shm_free: Bytes | None = None
    nofile: int | None = None  # the hard limit of open files: a run raises its soft limit to it
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
    """What a recipe needs from the machine."""

    kind: Kind = "cpu"
    ranks: int = 1
    nodes: int = 1
    device_bytes: Bytes = ZERO_BYTES  # predicted memory of one device
    error: float = 0.0  # its relative half-width
    checkpoint_bytes: Bytes = ZERO_BYTES
    disk_bytes: Bytes = ZERO_BYTES
    every: int = 0  # steps between two checkpoints
    interval: Seconds | None = None  # seconds between them
    ports: tuple[int, ...] = ()
    refusal: str = ""  # why no plan exists; the rest is unknown then
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
    """What the probe process measured with torch."""

    missing: str = ""  # why it measured nothing
    matmul_flops: Mapping[str, float] = field(default_factory=dict)  # FLOP/s by device
    failures: Mapping[str, str] = field(default_factory=dict)  # errors by device
    precision: str = "fp32"
    all_reduce: Mapping[str, Any] = field(default_factory=dict)  # the probe's answer about it
    archs: tuple[str, ...] = ()  # architectures that torch has kernels for
    capabilities: tuple[str, ...] = ()  # those of the devices


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


Status = Literal["pass", "warn", "fail", "skip"]
WORST_FIRST: dict[Status, int] = {"fail": 0, "warn": 1, "pass": 2, "skip": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the checklist: `what` was found, with its numbers, and a `fix` if something is wrong.

    `fail`: a run would crash or compute wrong results. `warn`: it would be slower or is at risk.
    `skip`: the check could not run, and `what` says why.
    """

    code: str
    title: str
    status: Status
    what: str
    fix: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """A check's code and title. Its methods build the check's results."""

    code: str
    title: str

    def passed(self, what: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="pass", what=what, evidence=evidence)

    def warn(self, what: str, fix: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="warn", what=what, fix=fix, evidence=evidence)

    def fail(self, what: str, fix: str, **evidence: Any) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="fail", what=what, fix=fix, evidence=evidence)

    def skipped(self, why: str) -> CheckResult:
        return CheckResult(code=self.code, title=self.title, status="skip", what=why)

    def worst(self, problems: "list[Problem]", healthy: str, **evidence: Any) -> CheckResult:
        """Return one result for all `problems`, with the status of the worst; a pass with `healthy` if none."""
        if not problems:
            return self.passed(healthy, **evidence)
        fatal_first = sorted(problems, key=lambda each: not each.is_fatal)
        fixes = list(dict.fromkeys(each.fix for each in fatal_first))
        return CheckResult(
            code=self.code,
            title=self.title,
            status="fail" if fatal_first[0].is_fatal else "warn",
            what="; ".join(each.what for each in fatal_first),
            fix="; ".join(fixes),
            evidence=evidence,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One of possibly several things that a check found."""

    what: str
    fix: str
    is_fatal: bool = False

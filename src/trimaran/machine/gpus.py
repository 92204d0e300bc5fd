"""The GPUs of this machine and the links between them, from the driver's tools; samples of them from NVML.

NVML's library is optional, so what a run needs comes from nvidia-smi. Bad output parses to nothing.
"""

import contextlib
import importlib
import json
import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from trimaran.core import Bytes, Seconds
from trimaran.machine.cluster import LATENCY_SECONDS, Link
from trimaran.machine.device_catalogue import Device
from trimaran.machine.host_limits import numa_node_of, read_text

log = logging.getLogger(__name__)

FULL_QUERY = ("nvidia-smi", "-q", "-x")
# Fields that every driver of the last ten years has: nvidia-smi rejects the whole query for one unknown field.
FIELDS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "memory.used", "driver_version", "compute_mode")
SHORT_QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
NAME_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
ROCM_QUERY = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
TOPOLOGY_MATRIX = ("nvidia-smi", "topo", "-m")
PEER_MATRIX = ("nvidia-smi", "topo", "-p2p", "r")
PATH_KINDS = r"X|NV\d+|PIX|PXB|PHB|NODE|SYS"
ESCAPES = re.compile(r"\x1b\[[\d;]*m")  # the header is underlined, even in a pipe
# Recovery actions that driver 580 reports in place of `reset_required`. `Drain and Reset` can wait for the run's end.
RECOVERY_ACTIONS = ("Reset", "Reboot", "Drain P2P")
TIMEOUT_SECONDS = 20.0
MEBIBYTE = 2**20

Matrix = Sequence[Sequence[str]]

# Bytes a second of one NVLink in one direction. NVLink 2 to 4 have 25e9, Blackwell twice that, the GA102 bridges less.
NVLINK_BANDWIDTH = {
    "B200": 50e9, "B300": 50e9, "GB200": 50e9, "GB300": 50e9, "RTX3090": 14e9, "RTX-A6000": 14e9, "A40": 14e9,
}  # fmt: skip
DEFAULT_NVLINK_BANDWIDTH = 25e9
SOCKET_BANDWIDTH = 20.8e9  # one UPI link at 10.4 GT/s in one direction, between the two sockets of a host
IN_HOST = {"PIX", "PXB", "PHB", "NODE"}  # through PCIe switches or the host bridges of one socket
PORT_RATE = re.compile(r"([\d.]+) Gb/sec")

MEGA = 1_000_000
ZERO_BYTES = Bytes(0)
# Bits of nvmlClocksEventReason* (nvml.h), without idle.
THROTTLE_REASONS = {
    0x02: "application_clocks",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
# Those that mean heat or a weak power supply. Not `power_cap`: a GPU under full load is at its power limit.
HARDWARE_THROTTLE_REASONS = ("hw_slowdown", "thermal", "hw_thermal", "power_brake")


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
class Gpu:
    """One GPU as nvidia-smi describes it; a value that it did not report is None."""

    index: int
    name: str
    uuid: str = ""
    bus: str = ""
    memory: Bytes = ZERO_BYTES
    used: Bytes = ZERO_BYTES
    ecc: Ecc | None = None
    clocks: GpuClocks | None = None
    compute_mode: str = ""
    mig: str = ""
    reset_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card; `numa` is -1 if Linux does not report its node."""

    name: str
    kind: Literal["infiniband", "ethernet"]
    is_up: bool
    gigabits: float = 0.0
    numa: int = -1


def run_driver_tool(command: Sequence[str]) -> str:
    """Return the output of a driver's tool; '' if it is missing, fails or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def list_gpus(visible: str | None) -> list[tuple[str, float]]:
    """Return name and MiB of the GPUs, of NVIDIA or else of AMD, that CUDA_VISIBLE_DEVICES=`visible` selects."""
    if visible is not None and not visible.strip(", "):
        return []
    chosen = () if visible is None else (f"--id={visible}",)
    rows = (line.rpartition(",") for line in run_driver_tool((*NAME_QUERY, *chosen)).splitlines())
    # A Grace-Blackwell or an iGPU may report `[N/A]`, which is not a memory size to plan with.
    if found := [(name.strip(), float(memory)) for name, _, memory in rows if memory.strip().isdigit()]:
        return found
    try:
        cards = json.loads(run_driver_tool(ROCM_QUERY) or "{}")
        pairs = [(str(card["Card Series"]), float(card["VRAM Total Memory (B)"]) / MEBIBYTE) for card in cards.values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # another version of the tool, or no card
    indices = range(len(pairs)) if visible is None else [int(each) for each in visible.split(",") if each.isdigit()]
    return [pairs[index] for index in indices if index < len(pairs)]


def parse_short_query(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of the short query, without ECC and clocks, and the driver version."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(FIELDS) and row[0].isdigit()]
    gpus = tuple(
        Gpu(
            index=int(row[0]),
            name=row[1],
            uuid=row[2],
            bus=row[3],
            memory=_mebibytes(row[4]),
            used=_mebibytes(row[5]),
            compute_mode=row[7],
        )
        for row in rows
    )
    return gpus, rows[0][6] if rows else ""


def parse_full_query(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of `nvidia-smi -q -x` in its order, and the driver version; nothing if it is not XML."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return (), ""
    gpus = []
    for index, node in enumerate(root.iter("gpu")):
        is_broken = _text(node, "gpu_recovery_action") in RECOVERY_ACTIONS
        gpus.append(
            Gpu(
                index=index,
                name=_text(node, "product_name"),
                uuid=_text(node, "uuid"),
                bus=_text(node, "pci/pci_bus_id"),
                memory=_mebibytes(_text(node, "fb_memory_usage/total")),
                used=_mebibytes(_text(node, "fb_memory_usage/used")),
                ecc=_ecc(node),
                clocks=_clocks(node),
                compute_mode=_text(node, "compute_mode"),
                mig=_text(node, "mig_mode/current_mig"),
                reset_required=is_broken or _text(node, "gpu_reset_status/reset_required") == "Yes",
            )
        )
    return tuple(gpus), _text(root, "driver_version")


def parse_topology(text: str) -> Matrix | None:
    """Return the connection between each pair of GPUs, from `nvidia-smi topo -m`; None if it shows no GPUs.

    `NV12` means twelve NVLinks; `PIX` to `SYS` are paths over PCIe, from short to long; `X` is the GPU itself.
    """
    return _gpu_matrix(text, PATH_KINDS)


def _gpu_matrix(text: str, entries: str) -> Matrix | None:
    """Return the columns of GPUs in the rows of GPUs; None if there are none. The first entry matches `entries`."""
    lines = ESCAPES.sub("", text).splitlines()
    rows = [line.split() for line in lines if re.match(rf"\s*GPU\d+\s+({entries})\s", line)]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    is_square = all(len(row) == len(rows) and row[index] == "X" for index, row in enumerate(matrix))
    return matrix if matrix and is_square else None


def parse_peers(text: str) -> Matrix:
    """Return peer access by pair of GPUs, from `nvidia-smi topo -p2p r`: `OK`, `X` for itself, or the reason."""
    return _gpu_matrix(text, r"X|OK|[A-Z]{1,3}") or []


def parse_gpu_nic_paths(text: str) -> Matrix:
    """Return the path from each GPU to each network card, from `nvidia-smi topo -m`; empty if it lists no cards."""
    lines = ESCAPES.sub("", text).splitlines()
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\s", line)), [])
    columns = [index for index, name in enumerate(header) if re.fullmatch(r"NIC\d+|mlx\d+_\w+", name)]
    if not columns:
        return []
    rows = [line.split()[1:] for line in lines if re.match(rf"\s*GPU\d+\s+({PATH_KINDS})\s", line)]
    return [[row[index] for index in columns] for row in rows if len(row) > max(columns)]


def _ecc(node: ElementTree.Element) -> Ecc | None:
    mode, errors = _text(node, "ecc_mode/current_ecc"), node.find("ecc_errors/volatile")
    if mode not in ("Enabled", "Disabled"):
        return None  # GeForce: N/A
    uncorrected = 0
    if errors is not None:
        # Since Ampere: sram_uncorrectable_*, dram_uncorrectable; before that: double_bit/total.
        named = [each for each in errors.iter() if "uncorrectable" in each.tag]
        named += [each for each in (errors.find("double_bit/total"),) if each is not None]
        uncorrected = sum(int(each.text) for each in named if each.text and each.text.strip().isdigit())
    pending = (
        "remapped_rows/remapped_row_pending",
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",
        "ecc_errors/channel_repair_pending",
        "ecc_errors/tpc_repair_pending",
    )
    exhausted = ("remapped_rows/remapped_row_failure", "ecc_errors/unrepairable_memory")
    return Ecc(
        enabled=mode == "Enabled",
        uncorrected=uncorrected,
        reset_pending=any(_text(node, path) == "Yes" for path in pending),
        spare_rows_exhausted=any(_text(node, path) == "Yes" for path in exhausted),
    )


def _clocks(node: ElementTree.Element) -> GpuClocks:
    reasons = node.find("clocks_event_reasons")
    reasons = node.find("clocks_throttle_reasons") if reasons is None else reasons
    active = [each.tag for each in (reasons if reasons is not None else ()) if (each.text or "").strip() == "Active"]
    names = tuple(re.sub(r"^clocks_(event|throttle)_reason_", "", tag) for tag in active)
    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    limit = _number(_text(node, f"{power}/current_power_limit"))
    return GpuClocks(
        throttle_reasons=tuple(name for name in names if not name.endswith("idle")),
        power_limit=_number(_text(node, f"{power}/power_limit")) if limit is None else limit,
        default_power_limit=_number(_text(node, f"{power}/default_power_limit")),
        clock=_number(_text(node, "applications_clocks/graphics_clock")),
        default_clock=_number(_text(node, "default_applications_clocks/graphics_clock")),
        pcie_width=_integer(_text(node, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        max_pcie_width=_integer(_text(node, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        temperature=_number(_text(node, "temperature/gpu_temp")),
    )


def _text(node: ElementTree.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text)
    return float(match[0]) if match else None


def _integer(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _mebibytes(text: str) -> Bytes:
    return Bytes(int((_number(text) or 0.0) * MEBIBYTE))


def gpu_links(matrix: Matrix, device: Device) -> tuple[Link, ...]:
    """Return the links between the GPUs of a node: NVLink, then PCIe, then the bus between sockets.

    A link connects blocks of neighbouring GPUs of equal size, because ranks are numbered in this order: pairs 0-1 and
    2-3 count, pairs 0-2 and 1-3 do not.
    """
    connections = {"NVLink": {"NV"}, "PCIe": {"NV", *IN_HOST}, "sockets": {"NV", *IN_HOST, "SYS"}}
    links: list[Link] = []
    for name, kinds in connections.items():
        count = len(matrix)
        sizes = (size for size in range(count, 0, -1) if count % size == 0)
        size = next(
            size for size in sizes if all(_connected(matrix, kinds, start, size) for start in range(0, count, size))
        )
        if size > (links[-1].devices if links else 1):
            if name == "NVLink":
                # All of a GPU's NVLinks. Behind a switch, nvidia-smi shows every peer with all links of the GPU, so the
                # device's own bandwidth is the cap.
                rows = ([entry for entry in row[:size] if entry.startswith("NV")] for row in matrix[:size])
                num_links = min(sum(int(entry[2:]) for entry in row) for row in rows)
                bandwidth = num_links * NVLINK_BANDWIDTH.get(device.name, DEFAULT_NVLINK_BANDWIDTH)
                if device.link_bandwidth > device.pcie_bandwidth:
                    bandwidth = min(bandwidth, device.link_bandwidth)
            else:
                bandwidth = device.pcie_bandwidth if name == "PCIe" else min(device.pcie_bandwidth, SOCKET_BANDWIDTH)
            links.append(Link(name=name, devices=size, bandwidth=bandwidth, latency=Seconds(LATENCY_SECONDS[name])))
    return tuple(links)


def read_nics(sys: Path = Path("/sys")) -> tuple[Nic, ...]:
    """Return the network cards: InfiniBand and RoCE ports, and physical Ethernet cards."""
    fabric = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate, card = PORT_RATE.match(read_text(port / "rate")), port.parents[1]
        fabric.append(Nic(name=card.name, kind="infiniband", is_up="ACTIVE" in read_text(port / "state"),
                          gigabits=float(rate[1]) if rate else 0.0, numa=numa_node_of(card / "device")))  # fmt: skip
    cards = []
    for card in sorted(sys.glob("class/net/*")):
        if (card / "device").exists():
            speed = read_text(card / "speed")
            cards.append(Nic(name=card.name, kind="ethernet", is_up=read_text(card / "operstate") == "up",
                             gigabits=int(speed) / 1000 if speed.isdigit() else 0.0,
                             numa=numa_node_of(card / "device")))  # fmt: skip
    return (*fabric, *cards)


def read_network(sys: Path = Path("/sys")) -> float:
    """Return the bytes a second, in one direction, of this machine's network cards; 0 if sysfs does not say.

    NCCL uses all InfiniBand and RoCE cards, so their rates add up. Of plain Ethernet cards only the fastest counts.
    """
    up = [nic for nic in read_nics(sys) if nic.is_up]
    fabric = [nic.gigabits for nic in up if nic.kind == "infiniband" and nic.gigabits]
    return (sum(fabric) or max((nic.gigabits for nic in up), default=0.0)) * 1e9 / 8


def _connected(matrix: Matrix, kinds: set[str], start: int, size: int) -> bool:
    seen, pending = {start}, [start]
    while pending:
        here = pending.pop()
        entries = {each: matrix[here][each] for each in range(start, start + size)}
        near = {each for each, entry in entries.items() if ("NV" if entry[:2] == "NV" else entry) in kinds} - seen
        seen |= near
        pending += near
    return len(seen) == size


class GpuSampler:
    """Samples the GPUs that the run may use. `visible` is like CUDA_VISIBLE_DEVICES: None means all, "" none.

    `library` is the module `pynvml` (nvidia-ml-py) or a fake with its functions.
    """

    def __init__(self, visible: str | None = None, *, library: Any = None) -> None:
        self._library, self._handles = library, {}
        self._warned = False
        if visible is not None and not visible.strip():
            return
        try:
            self._library = library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._handles = self._find(visible)
        except Exception as error:  # no library, no driver, no permission or no GPU
            log.info("GPUs are not sampled: %s", error)

    def _find(self, visible: str | None) -> dict[int, Any]:
        nvml = self._library
        if visible is None:
            return {number: nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())}
        names = enumerate(part.strip() for part in visible.split(","))
        by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
        return {number: by_index(int(name)) if name.isdigit() else by_uuid(name) for number, name in names}

    def sample(self) -> list[dict[str, Any]]:
        """Return one sample per GPU; values that it does not support are left out."""
        samples = []
        for number, handle in self._handles.items():
            found: dict[str, Any] = {"index": number}
            for query in NVML_QUERIES:
                try:
                    found |= query(self._library, handle)
                except Exception as error:  # many GPUs do not support all; one that fell off its bus supports none
                    if not self._warned:
                        log.info("GPU %d does not report all values: %s", number, error)
                    self._warned = True
            samples.append(found)
        return samples

    def close(self) -> None:
        if self._handles:
            with contextlib.suppress(Exception):
                self._library.nvmlShutdown()


def _text_of(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older versions of the library return bytes


# Each may fail by itself: many GPUs do not support all of them.
NVML_QUERIES: tuple[Callable[[Any, Any], dict[str, Any]], ...] = (
    lambda nvml, gpu: {"uuid": _text_of(nvml.nvmlDeviceGetUUID(gpu)), "name": _text_of(nvml.nvmlDeviceGetName(gpu))},
    lambda nvml, gpu: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100},
    lambda nvml, gpu: {"memory_used": (memory := nvml.nvmlDeviceGetMemoryInfo(gpu)).used, "memory": memory.total},
    lambda nvml, gpu: {"power": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
    lambda nvml, gpu: {"power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000},
    lambda nvml, gpu: {"power_limit_default": nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000},
    lambda nvml, gpu: {"temperature": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)},
    lambda nvml, gpu: {"sm_clock": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * MEGA},
    lambda nvml, gpu: {"sm_clock_max": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM) * MEGA},
    lambda nvml, gpu: {
        "throttle": [
            reason
            for bits in [nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)]
            for bit, reason in THROTTLE_REASONS.items()
            if bits & bit
        ]
    },
    lambda nvml, gpu: {  # since the driver was loaded
        "ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    },
    lambda nvml, gpu: {"pids": [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]},
)

"""Runs nvidia-smi and parses its full and short queries and its matrices. Bad output parses to nothing."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from xml.etree import ElementTree

from trimaran.core import Bytes
from trimaran.machine.checks.machine_facts import Ecc, Gpu, GpuClocks
from trimaran.machine.gpu_topology import Matrix

FULL_QUERY = ("nvidia-smi", "-q", "-x")
# Fields that every driver of the last ten years has: nvidia-smi rejects the whole query for one unknown field.
FIELDS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "memory.used", "driver_version", "compute_mode")
SHORT_QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
TOPOLOGY_MATRIX = ("nvidia-smi", "topo", "-m")
PEER_MATRIX = ("nvidia-smi", "topo", "-p2p", "r")
PATH_KINDS = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
# Recovery actions that driver 580 reports in place of `reset_required`. `Drain and Reset` can wait for the run's end.
RECOVERY_ACTIONS = ("Reset", "Reboot", "Drain P2P")
TIMEOUT_SECONDS = 20.0
MEBIBYTE = 2**20


def run_nvidia_smi(command: Sequence[str]) -> str:
    """Return the output of a command; '' if nvidia-smi is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


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
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.iter("gpu")))
    return gpus, _text(root, "driver_version")


def parse_peers(text: str) -> Matrix:
    """Return peer access by pair of GPUs, from `nvidia-smi topo -p2p r`: `OK`, `X` for itself, or the reason."""
    rows = [line.split() for line in _plain(text).splitlines() if re.match(r"\s*GPU\d+\s+(X|OK|[A-Z]{1,3})\s", line)]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    square = all(len(row) == len(rows) and row[index] == "X" for index, row in enumerate(matrix))
    return matrix if matrix and square else []


def parse_gpu_nic_paths(text: str) -> Matrix:
    """Return the path from each GPU to each network card, from `nvidia-smi topo -m`; empty if it lists no cards."""
    lines = _plain(text).splitlines()
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\s", line)), [])
    columns = [index for index, name in enumerate(header) if re.fullmatch(r"NIC\d+|mlx\d+_\w+", name)]
    if not columns:
        return []
    rows = [line.split()[1:] for line in lines if re.match(rf"\s*GPU\d+\s+({PATH_KINDS.pattern})\s", line)]
    return [[row[index] for index in columns] for row in rows if len(row) > max(columns)]


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    return Gpu(
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
        reset_required=_text(node, "gpu_reset_status/reset_required") == "Yes"
        or _text(node, "gpu_recovery_action") in RECOVERY_ACTIONS,
    )


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


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined even if the output is a pipe

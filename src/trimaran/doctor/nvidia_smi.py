"""What the driver's own tool says of GPUs: `nvidia-smi -q -x`, a short query, and matrices; parsed, never trusted."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from xml.etree import ElementTree

from trimaran.core import Bytes
from trimaran.doctor.machine_facts import Ecc, Gpu, GpuClocks
from trimaran.hardware.gpu_topology import Matrix

WHOLE = ("nvidia-smi", "-q", "-x")
# Fields that every driver of the last ten years has: an unknown one would spoil the whole answer.
FIELDS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "memory.used", "driver_version", "compute_mode")
QUICK = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
PEERS = ("nvidia-smi", "topo", "-p2p", "r")
WAYS = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
# What driver 580 asks for in the place of `reset_required`. `Drain and Reset` can wait until a run is over.
RECOVERIES = ("Reset", "Reboot", "Drain P2P")
SECONDS = 20.0
MEBI = 2**20


def ask(command: Sequence[str]) -> str:
    """Return what the tool answers; nothing where there is no tool, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def parse_quick(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of the short query, without ECC and clocks, and the driver's version."""
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


def parse_whole(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of `nvidia-smi -q -x` in the tool's order, and the driver's version; none where it is no XML."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return (), ""
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.iter("gpu")))
    return gpus, _text(root, "driver_version")


def parse_peers(text: str) -> Matrix:
    """Return whether each GPU may read each, from `nvidia-smi topo -p2p r`: `OK`, `X` for itself, or why not."""
    rows = [line.split() for line in _plain(text).splitlines() if re.match(r"\s*GPU\d+\s+(X|OK|[A-Z]{1,3})\s", line)]
    matrix = [row[1 : len(rows) + 1] for row in rows]
    square = all(len(row) == len(rows) and row[place] == "X" for place, row in enumerate(matrix))
    return matrix if matrix and square else []


def parse_ways_to_nics(text: str) -> Matrix:
    """Return the way from each GPU to each network card, from `nvidia-smi topo -m`; empty where it shows no cards."""
    lines = _plain(text).splitlines()
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\s", line)), [])
    columns = [place for place, name in enumerate(header) if re.fullmatch(r"NIC\d+|mlx\d+_\w+", name)]
    if not columns:
        return []
    rows = [line.split()[1:] for line in lines if re.match(rf"\s*GPU\d+\s+({WAYS.pattern})\s", line)]
    return [[row[place] for place in columns] for row in rows if len(row) > max(columns)]


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    return Gpu(
        index=index,
        name=_text(node, "product_name"),
        uuid=_text(node, "uuid"),
        bus=_text(node, "pci/pci_bus_id"),
        memory=_mebibytes(_text(node, "fb_memory_usage/total")),
        used=_mebibytes(_text(node, "fb_memory_usage/used")),
        ecc=_ecc(node),
        pace=_pace(node),
        compute_mode=_text(node, "compute_mode"),
        mig=_text(node, "mig_mode/current_mig"),
        reset_required=_text(node, "gpu_reset_status/reset_required") == "Yes"
        or _text(node, "gpu_recovery_action") in RECOVERIES,
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
    worn = ("remapped_rows/remapped_row_failure", "ecc_errors/unrepairable_memory")
    return Ecc(
        enabled=mode == "Enabled",
        uncorrected=uncorrected,
        is_pending=any(_text(node, path) == "Yes" for path in pending),
        is_worn=any(_text(node, path) == "Yes" for path in worn),
    )


def _pace(node: ElementTree.Element) -> GpuClocks:
    reasons = node.find("clocks_event_reasons")
    reasons = node.find("clocks_throttle_reasons") if reasons is None else reasons
    active = [each.tag for each in (reasons if reasons is not None else ()) if (each.text or "").strip() == "Active"]
    brakes = tuple(re.sub(r"^clocks_(event|throttle)_reason_", "", tag) for tag in active)
    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    limit = _number(_text(node, f"{power}/current_power_limit"))
    return GpuClocks(
        brakes=tuple(brake for brake in brakes if not brake.endswith("idle")),
        power_limit=_number(_text(node, f"{power}/power_limit")) if limit is None else limit,
        default_power_limit=_number(_text(node, f"{power}/default_power_limit")),
        clock=_number(_text(node, "applications_clocks/graphics_clock")),
        default_clock=_number(_text(node, "default_applications_clocks/graphics_clock")),
        pcie_width=_whole(_text(node, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        max_pcie_width=_whole(_text(node, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        temperature=_number(_text(node, "temperature/gpu_temp")),
    )


def _text(node: ElementTree.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text)
    return float(match[0]) if match else None


def _whole(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _mebibytes(text: str) -> Bytes:
    return Bytes(int((_number(text) or 0.0) * MEBI))


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined, even in a pipe

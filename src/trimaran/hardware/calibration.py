"""What was measured on a machine: a value, its file, and a cluster that it replaces the guesses of."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import Flops, Seconds, UserError
from trimaran.hardware.cluster import Cluster, Link
from trimaran.hardware.device_catalogue import DEVICES, STREAM_SHARE, Device
from trimaran.hardware.validation_error import first_mistake

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 18
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")

Positive = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]


class Collectives(BaseModel):
    """How `devices` neighbours talk: seconds a hop, and the bus bandwidth that each collective reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: Annotated[int, Field(ge=2, le=1 << 16)]
    latency_us: Positive
    all_reduce_gb_per_second: Positive | None = None
    all_gather_gb_per_second: Positive | None = None
    all_to_all_gb_per_second: Positive | None = None
    send_gb_per_second: Positive | None = None

    @property
    def reached(self) -> dict[str, float]:
        """Bytes a second by collective, as a Link has them."""
        told = self.model_dump(exclude={"devices", "latency_us"}, exclude_none=True)
        return {name.removesuffix("_gb_per_second"): rate * 1e9 for name, rate in told.items()}


class Calibration(BaseModel):
    """Measured rates of one device; where the cores of a machine are the devices, of all of them together.

    `launch_us` and `shapes` are to look at; the latter are the products behind the rates, TFLOP/s by
    `bf16 8192x8192x8192` (rows, inner, columns).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = ""
    date: str = ""
    fp32_tflops: Positive | None = None
    fp16_tflops: Positive | None = None
    bf16_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    memory_gb_per_second: Positive | None = None
    pcie_gb_per_second: Positive | None = None
    host_gb_per_second: Positive | None = None
    launch_us: Positive | None = None
    collectives: Collectives | None = None
    shapes: Annotated[dict[str, Positive], Field(max_length=64)] = {}


def calibration_folder(environ: Mapping[str, str]) -> Path:
    """Return where measurements are kept: under TRIMARAN_CACHE, or in the user's cache.

    The environment is handed in, because only those who start programs read it.
    """
    if named := environ.get("TRIMARAN_CACHE"):
        return Path(named) / "calibration"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran" / "calibration"


def parse_calibration(tree: object, *, where: str) -> Calibration:
    """Return the calibration that a person or `trimaran bench calibrate` wrote."""
    if not isinstance(tree, dict):
        raise UserError("C006", "the calibration is not a mapping", where=where,
                        fix="write it again with `trimaran bench calibrate`")  # fmt: skip
    try:
        return Calibration.model_validate(tree)
    except ValidationError as error:
        raise first_mistake(error, Calibration, code="C006", where=where) from None


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in the file; a file that is missing, damaged or too large is a person's mistake."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        tree = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C006", f"the calibration cannot be read: {error.strerror}", where=str(path),
                        fix="write it with `trimaran bench calibrate`") from None  # fmt: skip
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or brackets without end
        tree = None
    return parse_calibration(tree, where=str(path))


def find_calibration(folder: Path | None, machine: str) -> Calibration | None:
    """Return what was measured on this machine, if it was. A file that cannot be used is a warning, not an error."""
    if folder is None or not (path := folder / f"{machine}.json").exists():
        return None
    try:
        return read_calibration(path)
    except UserError as error:
        logger.warning(
            "the calibration in %s is ignored: %s; measure again: trimaran bench calibrate", path, error.what
        )
        return None


def apply_calibration(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Return the cluster with measured rates in place of those on paper, and a note that says so."""
    host = calibration.host_gb_per_second
    return replace(
        cluster,
        device=_measured_device(cluster, calibration),
        links=_measured_links(cluster, calibration.collectives),
        host_bandwidth=host * 1e9 if host else cluster.host_bandwidth,
    )


def _measured_device(cluster: Cluster, calibration: Calibration) -> Device:
    device = cluster.device
    is_cpu = device.kind == "cpu"
    # The ranks of a CPU cluster share what was measured on all cores. They compute in fp32: what a device lists is what
    # the planner may choose, and a measurement is no reason to train in another precision.
    share = 1 / cluster.devices_per_node if is_cpu else 1
    told = {each: getattr(calibration, f"{each}_tflops") for each in (PRECISIONS[:1] if is_cpu else PRECISIONS)}
    rates = {precision: Flops(rate * share * 1e12) for precision, rate in told.items() if rate}
    if not is_cpu and device.name in DEVICES:
        _refuse_wonders(device, rates)
    memory, pcie = (calibration.memory_gb_per_second or 0) * share * 1e9, calibration.pcie_gb_per_second
    return replace(
        device,
        # A CPU has no data sheet here: what it reaches is what it has.
        peak_flops={**device.peak_flops, **rates} if is_cpu else device.peak_flops,
        memory_bandwidth=memory / STREAM_SHARE["cpu"] if is_cpu and memory else device.memory_bandwidth,
        reached={**device.reached, **rates, **({"memory": memory} if memory else {})},
        pcie_bandwidth=pcie * 1e9 if pcie else device.pcie_bandwidth,
        note=f"measured{f' on {calibration.date}' if calibration.date else ''}",
    )


def _refuse_wonders(device: Device, rates: Mapping[str, Flops]) -> None:
    """Raise when a device would be faster than its data sheet, but for what a clock may add."""
    for precision, rate in rates.items():
        if rate > 1.1 * (peak := device.peak(precision)):
            raise UserError("C006", f"{precision}_tflops is {rate / 1e12:,.0f}, and {device.name} has at most "
                            f"{peak / 1e12:,.0f}", where="calibration",
                            fix="correct it, or measure with `trimaran bench calibrate`")  # fmt: skip


def _measured_links(cluster: Cluster, measured: Collectives | None) -> tuple[Link, ...]:
    """Return the links with the one that was measured: the innermost that joins as many devices, or more."""
    if measured is None:
        return cluster.links
    levels = list(cluster.levels)
    place = next((place for place, link in enumerate(levels) if link.devices >= measured.devices), -1)
    latency = Seconds(measured.latency_us * 1e-6)
    levels[place] = replace(levels[place], latency=latency, reached=measured.reached)
    return tuple(levels)

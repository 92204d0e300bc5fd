"""Measured rates of a machine: the value, its file, and a cluster with measured rates instead of assumed ones.

`fitted` rates are factors that whole runs have shown.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import Flops, Seconds, UserError, did_you_mean, read_regular_bytes, templated, user_cache
from trimaran.machine.cluster import Cluster, DiskRates, Link, network_link
from trimaran.machine.device_catalogue import DEVICES, STREAM_FRACTION, Device


def first_error(error: ValidationError, model: type[BaseModel], *, code: str, where: str) -> UserError:
    """Return the error to raise for the first invalid field of `model`."""
    first: Any = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    if not path:  # the rule is about several fields, or about the whole section
        message = first["msg"].removeprefix("Value error, ")
        return UserError(code, message, where=where, fix="correct that in this file")
    if first["type"] == "extra_forbidden":
        # The fields of the section that it is in; lists and unions are followed.
        for step in first["loc"][:-1]:
            if step in model.model_fields:
                model = next(_models(model.model_fields[str(step)].annotation), model)
        name, names = str(first["loc"][-1]), list(model.model_fields)
        return UserError(
            code,
            f"there is no field '{path}'{did_you_mean(name, names)}",
            where=where,
            fix=templated("the fields here are {names}", names=", ".join(names)),
        )
    return UserError(code, f"{path}: {first['msg']}", where=where, fix=f"correct {path} in that file")


def _models(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)


MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
MIN_GLOO_LATENCY_SECONDS = Seconds(1.1e-4)  # the cost model takes links with less for NCCL's
MAX_NCCL_LATENCY_SECONDS = Seconds(1e-4)
MAX_SOURCES = 256

Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4096)]


class LinkFactors(BaseModel):
    """Factors on the bandwidth and on the latency of all links of one kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: Factor = 1.0
    latency: Factor = 1.0


class SourceRun(BaseModel):
    """A run that rates were fitted to. `before` and `after` are the relative errors of its predicted step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Text
    date: Text = ""
    host: Text = ""
    version: Text = ""
    plan: Text = ""
    steps: Annotated[int, Field(ge=0)] = 0
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    before: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    after: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class FittedRates(BaseModel):
    """What full steps reach, relative to the rates that were assumed or measured in single operators."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: Text = ""
    matmul: Annotated[dict[str, Factor], Field(max_length=8)] = {}  # also of attention, by precision
    memory: Factor = 1.0  # bytes a second
    host: Factor = 1.0  # its time, so more is slower
    links: Annotated[dict[str, LinkFactors], Field(max_length=16)] = {}  # by name: NVLink, PCIe, InfiniBand, loopback
    runs: Annotated[tuple[SourceRun, ...], Field(max_length=MAX_SOURCES)] = ()

    @property
    def note(self) -> str:
        """Where the rates come from, for the source of a prediction."""
        runs = len({each.run for each in self.runs})
        return f"fitted to {runs} run{'' if runs == 1 else 's'}{f' on {self.date}' if self.date else ''}"


def with_fitted(cluster: Cluster, fitted: FittedRates | None) -> Cluster:
    """Return the cluster with the fitted factors on its rates. It is the last step: measured rates come before."""
    if fitted is None:
        return cluster
    links = tuple(_scaled_link(link, fitted) for link in cluster.levels) if fitted.links else cluster.links
    return replace(cluster, device=_scaled_device(cluster, fitted), links=links)


def combined(first: FittedRates | None, second: FittedRates) -> FittedRates:
    """Return the factors of both after each other, with the date and the runs of the second."""
    if first is None:
        return second
    none, links = LinkFactors(), {}
    for name in dict.fromkeys([*first.links, *second.links]):
        one, other = first.links.get(name, none), second.links.get(name, none)
        latency = _bounded(one.latency * other.latency)
        links[name] = LinkFactors(bandwidth=_bounded(one.bandwidth * other.bandwidth), latency=latency)
    known = {(each.run, each.plan) for each in second.runs}
    runs = (*(each for each in first.runs if (each.run, each.plan) not in known), *second.runs)
    return FittedRates(
        date=second.date,
        matmul={each: _bounded(first.matmul.get(each, 1.0) * second.matmul.get(each, 1.0))
                for each in dict.fromkeys([*first.matmul, *second.matmul])},
        memory=_bounded(first.memory * second.memory),
        host=_bounded(first.host * second.host),
        links=links,
        runs=runs[-MAX_SOURCES:],  # the latest
    )  # fmt: skip


def _bounded(factor: float) -> float:
    return min(MAX_FACTOR, max(MIN_FACTOR, factor))


def _scaled_device(cluster: Cluster, fitted: FittedRates) -> Device:
    device, memory, unchanged = cluster.device, fitted.memory, LinkFactors()
    near, network = cluster.levels[0].name, network_link(device, cluster.world_size).name
    device = replace(
        device,
        memory_bandwidth=device.memory_bandwidth * memory,
        link_bandwidth=device.link_bandwidth * fitted.links.get(near, unchanged).bandwidth,
        network_bandwidth=device.network_bandwidth * fitted.links.get(network, unchanged).bandwidth,
        note=f"{device.note}; {fitted.note}" if device.note else fitted.note,
    )
    reached = {name: rate * memory if name == "memory" else rate for name, rate in device.reached.items()}
    if device.traits.has_data_sheet:
        factors = {**fitted.matmul, "host": fitted.host}
        names = dict.fromkeys([*dict(device.fitted), *factors])
        pairs = tuple((name, device.factor(name) * factors.get(name, 1.0)) for name in names)
        return replace(device, fitted=pairs, reached=reached)
    # A CPU's rank with the factors: in the rates that were measured for it, or else in its estimated rate.
    compute, rates = fitted.matmul.get("fp32", 1.0), device.cpu_rates
    if "fp32" in reached:
        reached["fp32"] *= compute
    peak = {name: Flops(rate * compute) for name, rate in device.peak_flops.items()}
    if rates is not None:
        rates = rates._replace(
            matmul_gflops=rates.matmul_gflops * compute,
            attention_gflops=rates.attention_gflops * compute,
            attention_backward_gflops=rates.attention_backward_gflops * compute,
            elementwise_gb_per_second=rates.elementwise_gb_per_second * fitted.memory,
            update_gb_per_second=rates.update_gb_per_second * fitted.memory,
            layer_us=rates.layer_us * fitted.host,
        )
    return replace(device, peak_flops=peak, reached=reached, cpu_rates=rates)


def _scaled_link(link: Link, fitted: FittedRates) -> Link:
    factors = fitted.links.get(link.name)
    if factors is None:
        return link
    latency = link.latency * factors.latency
    # The cost model tells Gloo from NCCL by the latency: a link stays what it is.
    is_gloo = link.latency > MAX_NCCL_LATENCY_SECONDS
    latency = max(latency, MIN_GLOO_LATENCY_SECONDS) if is_gloo else min(latency, MAX_NCCL_LATENCY_SECONDS)
    reached = {name: rate * factors.bandwidth for name, rate in link.reached.items()}
    return replace(link, bandwidth=link.bandwidth * factors.bandwidth, latency=Seconds(latency), reached=reached)


logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 18
RING_FRACTION = 0.85  # of a link's bandwidth that rings reach, see `cost.collective`
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")

Positive = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]


class Collectives(BaseModel):
    """Measured collectives of `devices` neighbours: latency per hop, and the bus bandwidth of each collective."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: Annotated[int, Field(ge=2, le=1 << 16)]
    latency_us: Positive
    all_reduce_gb_per_second: Positive | None = None
    all_gather_gb_per_second: Positive | None = None
    all_to_all_gb_per_second: Positive | None = None
    send_gb_per_second: Positive | None = None

    @property
    def reached(self) -> dict[str, float]:
        """Bytes a second by collective, as in `Link.reached`."""
        rates = self.model_dump(exclude={"devices", "latency_us"}, exclude_none=True)
        return {name.removesuffix("_gb_per_second"): rate * 1e9 for name, rate in rates.items()}


class MeasuredDisk(BaseModel):
    """Measured rates of a node's local disk, in large direct requests; `both`: of each while both are going on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    read_gb_per_second: Positive
    write_gb_per_second: Positive
    both_gb_per_second: Positive


class Calibration(BaseModel):
    """Measured rates of one device; for CPU devices, of all cores of the machine together."""

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
    launch_us: Positive | None = None  # host time to start one small operator
    collectives: Collectives | None = None  # inside a node
    # Between nodes, by `bench comm`. Its latency is that of a link; the cost model takes a multiple of it for a hop.
    network: Collectives | None = None
    disk: MeasuredDisk | None = None
    # For information: the matmuls behind the rates, TFLOP/s by `bf16 8192x8192x8192` (rows, inner, columns).
    shapes: Annotated[dict[str, Positive], Field(max_length=64)] = {}
    # Factors on all of these, and on the catalogue's rates where nothing was measured, by `calibrate --from`.
    fitted: FittedRates | None = None

    @property
    def is_measured(self) -> bool:
        """Whether single operators were measured: `bench calibrate` does, and `calibrate --from` alone does not."""
        links = {"collectives", "network", "disk"}
        return bool(self.model_dump(exclude={"device", "date", "shapes", "fitted", *links}, exclude_none=True))


def calibration_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of measurements: under TRIMARAN_CACHE or the user's cache; None without a home directory."""
    if named := environ.get("TRIMARAN_CACHE"):
        return Path(named) / "calibration"
    cache = user_cache(environ)
    return cache / "calibration" if cache else None


def parse_calibration(tree: object, *, where: str) -> Calibration:
    """Return the calibration that the user or `trimaran bench calibrate` wrote."""
    if not isinstance(tree, dict):
        raise UserError("C006.calibration-not-mapping", where=where)
    try:
        return Calibration.model_validate(tree)
    except ValidationError as error:
        raise first_error(error, Calibration, code="C006", where=where) from None


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in the file; raise UserError if it is missing, damaged or too large."""
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        tree = json.loads(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C006.calibration-cannot-read", where=str(path), reason=error.strerror) from None
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deep
        tree = None
    return parse_calibration(tree, where=str(path))


def find_calibration(folder: Path | None, machine: str) -> Calibration | None:
    """Return the measurements of this machine, or None. An unusable file is a warning, not an error."""
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
    """Return the cluster with measured rates instead of those of the catalogue, and a note that says so."""
    return with_fitted(apply_measured(cluster, calibration), calibration.fitted)


def apply_measured(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Return the cluster with measured rates, without those that were fitted to runs."""
    host, disk, rates = calibration.host_gb_per_second, calibration.disk, cluster.disk
    if disk:
        rates = DiskRates(read=disk.read_gb_per_second * 1e9, both=disk.both_gb_per_second * 1e9)
    return replace(
        cluster,
        device=_measured_device(cluster, calibration) if calibration.is_measured else cluster.device,
        links=_measured_links(cluster, calibration),
        host_bandwidth=host * 1e9 if host else cluster.host_bandwidth,
        disk=rates,
    )


def _measured_device(cluster: Cluster, calibration: Calibration) -> Device:
    device = cluster.device
    is_cpu = device.traits.shares_cores
    # The ranks of a CPU cluster share what was measured on all cores. They compute in fp32: the planner may choose any
    # precision that a device lists, and a measurement is no reason to train in another precision.
    fraction = 1 / cluster.devices_per_node if is_cpu else 1
    tflops = {each: getattr(calibration, f"{each}_tflops") for each in (PRECISIONS[:1] if is_cpu else PRECISIONS)}
    rates = {precision: Flops(rate * fraction * 1e12) for precision, rate in tflops.items() if rate}
    for precision, rate in rates.items() if not is_cpu and device.name in DEVICES else ():
        if rate > 1.1 * (peak := device.peak(precision)):  # higher clocks explain no more
            raise UserError(
                "C006.tflops-most",
                where="calibration",
                precision=precision,
                rate=rate / 1000000000000.0,
                device=device.name,
                peak=peak / 1000000000000.0,
            )
    memory, pcie = (calibration.memory_gb_per_second or 0) * fraction * 1e9, calibration.pcie_gb_per_second
    launch = {} if is_cpu or not calibration.launch_us else {"launch": calibration.launch_us * 1e-6}
    return replace(
        device,
        # A CPU has no data sheet here: its measured rate is its peak.
        peak_flops={**device.peak_flops, **rates} if is_cpu else device.peak_flops,
        memory_bandwidth=memory / STREAM_FRACTION["cpu"] if is_cpu and memory else device.memory_bandwidth,
        reached={**device.reached, **rates, **({"memory": memory} if memory else {}), **launch},
        pcie_bandwidth=pcie * 1e9 if pcie else device.pcie_bandwidth,
        note=f"measured{f' on {calibration.date}' if calibration.date else ''}",
    )


def _measured_links(cluster: Cluster, calibration: Calibration) -> tuple[Link, ...]:
    """Return the links with measured rates: between nodes, and of the innermost that connects as many devices."""
    inside, network = calibration.collectives, calibration.network if cluster.num_nodes > 1 else None
    if inside is None and network is None:
        return cluster.links
    levels = list(cluster.levels)
    if inside is not None:
        index = next((index for index, link in enumerate(levels) if link.devices >= inside.devices), -1)
        levels[index] = _measured_link(levels[index], inside)
    if network is not None:
        outer = _measured_link(levels[-1], network)
        # What follows from the bandwidth itself, such as a tree, is no faster than what was measured.
        shared = {"all_reduce", "all_gather"}  # by the devices of a node: their rates are those of all its cards
        best = max(rate / (cluster.devices_per_node if name in shared else 1) for name, rate in outer.reached.items())
        levels[-1] = replace(outer, bandwidth=min(outer.bandwidth, best / RING_FRACTION))
    return tuple(levels)


def _measured_link(link: Link, measured: Collectives) -> Link:
    return replace(link, latency=Seconds(measured.latency_us * 1e-6), reached=measured.reached)

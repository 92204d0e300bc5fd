"""Parses a cluster: `auto`, `8xH100`, `4x8xA100-80GB`, `4xA100-80GB+4xL40S`, `2xcpu` or a YAML file.

Also the cluster of a recipe, and the part of it that a run uses. `environment` is an argument: only entry points read
it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import GIB, Bytes, Recipe, Seconds, TextError, UserError, load_yaml, read_regular_bytes, templated
from trimaran.machine.calibration import (
    Calibration,
    apply_calibration,
    apply_measured,
    calibration_folder,
    find_calibration,
    first_error,
    parse_calibration,
    read_calibration,
)
from trimaran.machine.cluster import LATENCY_SECONDS, Cluster, Link, mixed_cluster
from trimaran.machine.detect import cpu_cluster, detect, machine_name
from trimaran.machine.device_catalogue import find_device

MAX_FILE_BYTES = 1 << 16
MAX_DEVICES = 1 << 20
CLUSTER = re.compile(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?((?!\d+x)[a-z0-9][a-z0-9 _-]*)", re.IGNORECASE)
JOINED = re.compile(r"(\d{1,7})\s*([a-z].*)", re.IGNORECASE)  # 8h100
TURNED = re.compile(r"(.+?)\s*x\s*(\d{1,7})", re.IGNORECASE)  # h100x8
EXAMPLES = "write auto, 8xH100, 4x8xA100-80GB, 4xA100-80GB+4xL40S, 2xcpu or the name of a YAML file"
MAX_GROUPS = 64

Positive = Annotated[float, Field(gt=0, lt=1e6)]


class MeasuredBandwidths(BaseModel):
    """Measured bus bandwidths of a link, in 10^9 bytes a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all_reduce: Positive | None = None
    all_gather: Positive | None = None
    all_to_all: Positive | None = None
    send: Positive | None = None


class LinkFile(BaseModel):
    """A link in a cluster file. The last of the list may leave out `devices`: it connects all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=40)]
    devices: Annotated[int, Field(ge=2, le=MAX_DEVICES)] | None = None
    gb_per_second: Positive
    latency_us: Positive | None = None
    reached: MeasuredBandwidths = MeasuredBandwidths()


class ClusterFile(BaseModel):
    """A cluster file. Bandwidths are per device in one direction; the catalogue fills in the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    num_nodes: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    memory_gib: Positive | None = None
    host_memory_gib: Positive | None = None
    link_gb_per_second: Positive | None = None
    network_gb_per_second: Positive | None = None
    links: Annotated[tuple[LinkFile, ...], Field(max_length=8)] = ()
    calibration: str | dict[str, Any] | None = None


def parse_cluster(
    text: str, *, visible_devices: str | None = None, calibrations: Path | None = None, threads: int | None = None
) -> Cluster:
    """Return the cluster that `text` names.

    `visible_devices` applies to `auto` only. `calibrations` and `threads` apply to this machine: `auto` and `2xcpu`;
    see `detect`. A calibration that was fitted to runs is one of a fleet, and applies to a device of the catalogue too.
    """
    text = text.strip()
    if text.casefold() == "auto":
        return detect(visible_devices=visible_devices, calibrations=calibrations, threads=threads)
    if text.endswith((".yaml", ".yml")):
        return _read_cluster(Path(text))
    if "+" in text:
        names = text.split("+")
        if len(names) > MAX_GROUPS:
            raise UserError("C002.cluster-groups-too", where="cluster", num_names=len(names), max_groups=MAX_GROUPS)
        return mixed_cluster([_parse_devices(name.strip(), calibrations) for name in names])
    return _parse_devices(text, calibrations, threads)


def _parse_devices(text: str, calibrations: Path | None, threads: int | None = None) -> Cluster:
    """Return the equal devices that `text` names, also as `8 x H100`, `8h100` or `h100x8`."""
    match = CLUSTER.fullmatch(re.sub(r"(?<=\d)\s*[x×]\s*(?=\w)", "x", text))
    if match is None:
        raise UserError("C002.not-cluster", where="cluster", text=text)
    counts, name = [int(each) for each in match.groups()[:2] if each], match[3]
    if not _is_device(name):
        if name.isdigit():
            raise UserError(
                "C002.names-no-device", where="cluster", text=text, names="x".join([*map(str, counts), name])
            )
        joined, turned = JOINED.fullmatch(name), TURNED.fullmatch(name)
        if joined and len(counts) < 2 and _is_device(joined[2]):
            counts, name = [*counts, int(joined[1])], joined[2]
        elif turned and not counts and _is_device(turned[1]):
            counts, name = [int(turned[2])], turned[1]
    if 0 in counts:
        raise UserError("C003.no-devices", where="cluster", text=text)
    return _build(counts, name, text, calibrations, threads)


def _is_device(name: str) -> bool:
    try:
        find_device(name)
    except UserError:
        return False
    return True


def _build(
    counts: list[int], name: str, text: str, calibrations: Path | None = None, threads: int | None = None
) -> Cluster:
    device = find_device(name)
    if len(counts) == 2:
        num_nodes, devices_per_node = counts
    else:
        num_devices = counts[0] if counts else 1
        num_nodes = 1 if device.traits.shares_cores else -(-num_devices // device.node_size)
        if num_devices % num_nodes:
            raise UserError(
                "C003.devices-not-fill-equal",
                where="cluster",
                num_devices=num_devices,
                num_nodes=num_nodes,
                node_size=device.node_size,
                device=device.name,
            )
        devices_per_node = num_devices // num_nodes
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise UserError("C003.devices", where="cluster", text=text, max_devices=MAX_DEVICES)
    if device.traits.shares_cores:  # the other nodes are assumed to equal this one
        here = cpu_cluster(devices_per_node, calibrations=calibrations, threads=threads)
        cluster = replace(here, num_nodes=num_nodes)
        calibration = find_calibration(calibrations, machine_name(cluster)) if num_nodes > 1 else None
        if calibration is None or calibration.network is None:
            return cluster
        return apply_measured(cluster, Calibration(network=calibration.network))
    cluster = Cluster(device=device, num_nodes=num_nodes, devices_per_node=devices_per_node)
    calibration = find_calibration(calibrations, machine_name(cluster))
    return apply_calibration(cluster, calibration) if calibration and calibration.fitted else cluster


def _read_cluster(path: Path) -> Cluster:
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_FILE_BYTES + 1)
        tree = load_yaml(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C004.cluster-file", where=str(path), reason=error.strerror) from None
    except TextError as error:
        where = templated("{path}, line {line}", path=path, line=error.line) if error.line else str(path)
        raise UserError("C004.not-yaml", where=where, error=error.what) from None
    if not isinstance(tree, dict):
        raise UserError("C004.not-small-yaml", where=str(path))
    try:
        file = ClusterFile.model_validate(tree)
    except ValidationError as error:
        raise first_error(error, ClusterFile, code="C005", where=str(path)) from None
    cluster = _build([file.num_nodes, file.devices_per_node], file.device, str(path))
    device = cluster.device
    if file.memory_gib:
        device = replace(device, memory_bytes=Bytes(int(file.memory_gib * GIB)))
    if file.link_gb_per_second:
        device = replace(device, link_bandwidth=file.link_gb_per_second * 1e9)
    if file.network_gb_per_second:
        device = replace(device, network_bandwidth=file.network_gb_per_second * 1e9)
    if file.host_memory_gib:
        cluster = replace(cluster, host_bytes=Bytes(int(file.host_memory_gib * GIB)))
    cluster = replace(cluster, device=device, links=_links(file, cluster.world_size, path))
    if file.calibration is None:
        return cluster
    if isinstance(file.calibration, str):
        return apply_calibration(cluster, read_calibration(path.parent / file.calibration))
    return apply_calibration(cluster, parse_calibration(file.calibration, where=f"{path}: calibration"))


def _links(file: ClusterFile, world_size: int, path: Path) -> tuple[Link, ...]:
    """Return the links of the file; raise unless their sizes grow and the last connects all devices."""
    if not file.links:
        return ()
    sizes = [each.devices for each in file.links[:-1]] + [file.links[-1].devices or world_size]
    if file.link_gb_per_second or file.network_gb_per_second:
        raise UserError("C007.bandwidths-set-twice", where=str(path))
    if sizes[-1] != world_size:
        raise UserError("C007.last-link-connects", where=f"{path}: links", sizes=sizes[-1], world_size=world_size)
    for inner, outer in pairwise(sizes):
        if inner is None or outer is None or outer <= inner or outer % inner:
            raise UserError("C007.link-devices", where=f"{path}: links", inner=inner or "all", outer=outer or "all")
    links = []
    for each, size in zip(file.links, sizes, strict=True):
        reached = {name: rate * 1e9 for name, rate in each.reached.model_dump(exclude_none=True).items()}
        usual = LATENCY_SECONDS.get(each.name, LATENCY_SECONDS["network"])
        latency = Seconds(each.latency_us * 1e-6 if each.latency_us else usual)
        devices, bandwidth = size or world_size, each.gb_per_second * 1e9
        links.append(Link(name=each.name, devices=devices, bandwidth=bandwidth, latency=latency, reached=reached))
    return tuple(links)


def cluster_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks use."""
    cluster = full_cluster(recipe, environment)
    if cluster.world_size != world_size and cluster.device.traits.shares_cores and cluster.num_nodes == 1:
        return parse_cluster(f"{world_size}xcpu", calibrations=calibration_folder(environment))
    return part_of(cluster, world_size)


def part_of(cluster: Cluster, world_size: int) -> Cluster:
    """Return the part of a cluster that `world_size` ranks use: whole nodes, or a part of one."""
    if cluster.world_size == world_size:
        return cluster
    per_node = min(world_size, cluster.devices_per_node)
    if world_size % per_node:
        raise UserError("C003.devices-not-fill", where="faults.ranks", world_size=world_size, per_node=per_node)
    # Of several kinds of devices it is not known which are left: the plan is for the one with the least memory.
    return replace(cluster, num_nodes=world_size // per_node, devices_per_node=per_node, groups=())


def full_cluster(recipe: Recipe, environment: Mapping[str, str]) -> Cluster:
    """Return the recipe's cluster."""
    visible, measured = environment.get("CUDA_VISIBLE_DEVICES"), calibration_folder(environment)
    return parse_cluster(recipe.cluster, visible_devices=visible, calibrations=measured)

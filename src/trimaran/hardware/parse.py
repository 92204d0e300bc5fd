"""A cluster's text in, Cluster out: `auto`, `8xH100`, `4x8xA100-80GB`, `2xcpu` or a YAML file."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import GIB, Bytes, UserError, nearest
from trimaran.hardware.catalogue import find_device
from trimaran.hardware.cluster import Cluster
from trimaran.hardware.detect import cpu_cluster, detect

MAX_FILE_BYTES = 1 << 16
MAX_DEVICES = 1 << 16
CLUSTER = re.compile(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?((?!\d+x)[a-z0-9][a-z0-9 _-]*)", re.IGNORECASE)
EXAMPLES = "write auto, 8xH100, 4x8xA100-80GB, 2xcpu or the name of a YAML file"

Positive = Annotated[float, Field(gt=0, lt=1e6)]


class ClusterFile(BaseModel):
    """What a person writes about a cluster. Bandwidths are of one device, one way; the catalogue fills in the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    num_nodes: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    memory_gib: Positive | None = None
    link_gb_per_second: Positive | None = None
    network_gb_per_second: Positive | None = None


def parse_cluster(text: str, *, visible_devices: str | None = None) -> Cluster:
    """Return the cluster that `text` names. `visible_devices` counts only for `auto`, see `detect`."""
    text = text.strip()
    if text.casefold() == "auto":
        return detect(visible_devices=visible_devices)
    if text.endswith((".yaml", ".yml")):
        return _read_cluster(Path(text))
    match = CLUSTER.fullmatch(text)
    if match is None:
        raise UserError("C002", f"'{text}' is not a cluster", where="cluster", fix=EXAMPLES)
    counts = [int(each) for each in match.groups()[:2] if each]
    if 0 in counts:
        raise UserError("C003", f"'{text}' has no devices", where="cluster", fix=EXAMPLES)
    return _build(counts, match[3], text)


def _build(counts: list[int], name: str, text: str) -> Cluster:
    device = find_device(name)
    if len(counts) == 2:
        num_nodes, devices_per_node = counts
    else:
        num_devices = counts[0] if counts else 1
        num_nodes = 1 if device.kind == "cpu" else -(-num_devices // device.node_size)
        if num_devices % num_nodes:
            raise UserError("C003", f"{num_devices} devices do not fill {num_nodes} equal nodes", where="cluster",
                            fix=f"name the nodes: {num_nodes}x{device.node_size}x{device.name}")  # fmt: skip
        devices_per_node = num_devices // num_nodes
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise UserError("C003", f"'{text}' has more than {MAX_DEVICES:,} devices", where="cluster", fix=EXAMPLES)
    if device.kind == "cpu":  # the other nodes are taken to be like this one
        return replace(cpu_cluster(devices_per_node), num_nodes=num_nodes)
    return Cluster(device=device, num_nodes=num_nodes, devices_per_node=devices_per_node)


def _read_cluster(path: Path) -> Cluster:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        tree = yaml.safe_load(raw) if len(raw) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError("C004", f"the cluster file cannot be read: {error.strerror}", where=str(path),
                        fix="name a file that exists, or a cluster such as 8xH100") from None  # fmt: skip
    except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: a date that does not exist
        tree = None
    if not isinstance(tree, dict):
        raise UserError("C004", "this is not a small YAML mapping", where=str(path),
                        fix="start from: {device: H100, num_nodes: 2, devices_per_node: 8}")  # fmt: skip
    try:
        told = ClusterFile.model_validate(tree)
    except ValidationError as error:
        raise _mistake(error, path) from None
    cluster = _build([told.num_nodes, told.devices_per_node], told.device, str(path))
    device = cluster.device
    if told.memory_gib:
        device = replace(device, memory_bytes=Bytes(int(told.memory_gib * GIB)))
    if told.link_gb_per_second:
        device = replace(device, link_bandwidth=told.link_gb_per_second * 1e9)
    if told.network_gb_per_second:
        device = replace(device, network_bandwidth=told.network_gb_per_second * 1e9)
    return replace(cluster, device=device)


def _mistake(error: ValidationError, path: Path) -> UserError:
    first = error.errors(include_url=False)[0]
    field, known = ".".join(map(str, first["loc"])), list(ClusterFile.model_fields)
    if first["type"] == "extra_forbidden":
        return UserError("C005", f"there is no field '{field}'{nearest(field, known)}", where=str(path),
                         fix=f"the fields here are {', '.join(known)}")  # fmt: skip
    return UserError("C005", f"{field}: {first['msg']}", where=str(path), fix=f"correct {field} in that file")

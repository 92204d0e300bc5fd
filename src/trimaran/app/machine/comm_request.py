"""Parses what `trimaran bench comm` measures, and measures it: here, on several nodes, or as a rank of torchrun."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import psutil
from rich.console import Console

from trimaran.app.machine.bench import run_measurement
from trimaran.app.machine.machine_check import interface_to
from trimaran.core import DEVICE_TRAITS, Mesh, UserError, did_you_mean, templated
from trimaran.cost import ring_of
from trimaran.launch import shared_gpu_environment
from trimaran.machine import BUS_FACTORS, Cluster, CommCurve, CommPair, CommResult, detect, make_points, num_cores

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9,
         "k": 2**10, "m": 2**20, "g": 2**30}  # fmt: skip
SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)", re.IGNORECASE)
RANGE_FACTOR = 4  # between the sizes of a range, unless it ends with *2
MAX_SIZES, MAX_BYTES = 64, 1 << 40
DEFAULT_SIZES = {"cpu": "1KiB..16MiB", "cuda": "1KiB..256MiB"}
# Axes of a plan from the outermost to the innermost, as ranks are numbered, and the axes that join others.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED_AXES = {"dp": ("dp_replicate", "dp_shard"), "shards": ("dp_shard", "cp"),
               "data": ("dp_replicate", "dp_shard", "cp")}  # fmt: skip
WHERE = "trimaran bench comm"
DEFAULT_SECONDS = 20.0
MAX_CPU_RANKS, MAX_RANKS = 8, 64  # forked by default, and at most, on one machine
MEETING_SECONDS = 120.0  # for the other nodes to start
HOST_MEMORY_FRACTION = 0.5  # of what is free, for the messages of CPU ranks
READ_BY_BACKENDS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_", "UCX_", "RCCL_")
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGroups:
    """Disjoint groups of ranks of equal size, and how many nodes each spans."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    nodes: int


def parse_collectives(text: str) -> list[str]:
    """Return the collectives that `text` lists; `all` is every one."""
    words = [word.strip().replace("-", "_").lower() for word in text.split(",") if word.strip()]
    if words == ["all"] or not words:
        return list(BUS_FACTORS)
    for word in words:
        if word not in BUS_FACTORS:
            raise _wrong(f"'{word}' is not a collective{did_you_mean(word, BUS_FACTORS)}", "--collectives",
                         f"use some of {', '.join(BUS_FACTORS)}")  # fmt: skip
    return list(dict.fromkeys(words))


def parse_sizes(text: str) -> list[int]:
    """Return message sizes in bytes, ascending: `1KiB,1MiB`, or a range `1KiB..16MiB`, or `1KiB..16MiB*2`."""
    sizes: set[int] = set()
    for part in text.split(","):
        span, _, factor = part.partition("*")
        first, dots, last = span.partition("..")
        if not dots:
            if factor:
                raise _wrong(f"'{part.strip()}' has a factor but is not a range", "--sizes", "write 1KiB..16MiB*2")
            sizes.add(_size(first))
            continue
        step = int(factor) if factor.strip().isdigit() and len(factor) < 5 else (0 if factor else RANGE_FACTOR)
        low, high = _size(first), _size(last)
        if step < 2 or low > high:
            raise _wrong(f"'{part.strip()}' is not a range of sizes", "--sizes", "write 1KiB..16MiB or 1KiB..16MiB*2")
        while low <= high and len(sizes) <= MAX_SIZES:
            sizes.add(low)
            low *= step
    if len(sizes) > MAX_SIZES:
        raise _wrong(f"these are more than {MAX_SIZES} sizes", "--sizes", "use a larger factor: 1KiB..1GiB*4")
    return sorted(sizes)


def _size(text: str) -> int:
    match = SIZE.fullmatch(text.strip())
    if match is None or (unit := match[2].lower()) not in UNITS:
        raise _wrong(f"'{text.strip()}' is not a size", "--sizes", "write 4096, 1KiB, 16MiB or 1GiB")
    size = int(float(match[1]) * UNITS[unit])
    if not 1 <= size <= MAX_BYTES:
        raise _wrong(f"'{text.strip()}' is not from 1 byte to 1 TiB", "--sizes", "write 4096, 1KiB, 16MiB or 1GiB")
    return size


def parse_groups(text: str, *, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> list[NamedGroups]:
    """Return the groups that `text` lists: `world`, `node`, a number of neighbouring ranks, or an axis of the plan."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    found = [_groups(word, world_size, ranks_per_node, mesh) for word in words]
    if not found:
        raise _wrong("no group is named", "--groups", "write world, node, a number of ranks, or an axis of a plan")
    return [
        NamedGroups(name=word, ranks=ranks, nodes=max(len({rank // ranks_per_node for rank in each}) for each in ranks))
        for word, ranks in zip(words, found, strict=True)
    ]


def default_groups(*, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> str:
    """Return the world, a node where there are several with several ranks, and the axes of the plan."""
    several = 1 < ranks_per_node < world_size
    axes = [axis for axis in MESH_AXES if mesh is not None and 1 < getattr(mesh, axis) < world_size]
    return ",".join(["world", *(["node"] if several else []), *axes])


def _groups(word: str, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> tuple[tuple[int, ...], ...]:
    axes = JOINED_AXES.get(word, (word,) if word in MESH_AXES else ())
    if axes:
        if mesh is None:
            raise _wrong(f"'{word}' is an axis of a plan, and no plan is named", "--groups",
                         "name its recipe with --recipe FILE, or a number of ranks such as 2")  # fmt: skip
        if mesh.world_size != world_size:
            raise _wrong(f"the plan has {mesh.world_size} ranks, and {world_size} are measured", "--groups",
                         f"measure with --ranks {mesh.world_size}, or set the recipe's cluster")  # fmt: skip
        groups = axis_groups(mesh, axes)
    elif word in ("world", "node") or word.isdigit():
        size = {"world": world_size, "node": ranks_per_node}.get(word) or int(word[:9])
        if not 2 <= size <= world_size or world_size % size:
            raise _wrong(f"groups of {size} do not split {world_size} ranks into equal groups of two or more",
                         "--groups", f"use a divisor of {world_size}, at least 2")  # fmt: skip
        groups = tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))
    else:
        known = ["world", "node", *MESH_AXES, *JOINED_AXES]
        raise _wrong(f"'{word}' is not a group{did_you_mean(word, known)}", "--groups",
                     "write world, node, a number of neighbouring ranks, or an axis of a plan such as tp")  # fmt: skip
    if len(groups[0]) < 2:
        raise _wrong(f"a group of {word} has one rank in this plan", "--groups", "leave it out")
    return groups


def axis_groups(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that differ in these axes only, by group. Ranks are numbered as in training."""
    degrees = [getattr(mesh, axis) for axis in MESH_AXES]
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place, rest = [], rank
        for axis, degree in zip(reversed(MESH_AXES), reversed(degrees), strict=True):
            rest, index = divmod(rest, degree)
            place.append(0 if axis in axes else index)
        by_place.setdefault(tuple(place), []).append(rank)
    return tuple(tuple(ranks) for ranks in by_place.values())


def _wrong(what: str, where: str, fix: str) -> UserError:
    return UserError("C010", what, where=f"{WHERE} {where}", fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """What to measure. Empty texts and None mean the defaults of the machine."""

    collectives: str = "all"
    sizes: str = ""
    groups: str = ""
    backend: str = ""
    dtype: str = "fp32"
    seconds: float = DEFAULT_SECONDS
    ranks: int | None = None
    nodes: int = 1
    node: int = 0
    address: str = ""
    mesh: Mesh | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommPlaces:
    """Which ranks this process starts, of how many, and where all of them meet; no address: on this machine."""

    first: int
    here: int
    world_size: int
    per_node: int
    first_device: int = 0
    address: str = ""
    hosts_store: bool = True


def measure_comm(options: CommOptions, environ: Mapping[str, str], console: Console) -> CommResult | None:
    """Return the measured collectives; None on all nodes and ranks but the first."""
    if options.backend and options.backend not in BACKENDS:
        raise _wrong(
            f"'{options.backend}' is not a backend",
            "--backend",
            templated("use one of {backends}", backends=", ".join(BACKENDS)),
        )
    cluster = detect(visible_devices="" if options.backend == "gloo" else environ.get("CUDA_VISIBLE_DEVICES"))
    backend = options.backend or cluster.device.traits.backend
    if BACKENDS[backend] != cluster.device.kind:
        raise _wrong("NCCL needs GPUs, and this machine shows none", "--backend", "use --backend gloo")
    places = find_places(options, cluster, environ)
    if options.dtype not in DTYPES:
        raise _wrong(
            f"'{options.dtype}' is not a dtype", "--dtype", templated("use one of {dtypes}", dtypes=", ".join(DTYPES))
        )
    kind, shape = cluster.device.kind, {"world_size": places.world_size, "ranks_per_node": places.per_node}
    collectives, sizes = parse_collectives(options.collectives), parse_sizes(options.sizes or DEFAULT_SIZES[kind])
    text = options.groups or default_groups(**shape, mesh=options.mesh)
    groups = parse_groups(text, **shape, mesh=options.mesh)
    num_bytes = max(sizes)
    free = psutil.virtual_memory().available
    if not DEVICE_TRAITS[kind].has_own_memory and 2 * num_bytes * places.here > HOST_MEMORY_FRACTION * free:
        raise _wrong(f"{places.here} ranks with two messages of {num_bytes / 2**20:,.0f} MiB each do not fit into half "
                     f"of the free memory, {free / 2**30:.1f} GiB", "--sizes", "end with a smaller size")  # fmt: skip
    # gloo uses the interface to the other nodes unless the user named one.
    interface = interface_to(places.address) if places.address else "lo"
    environment = {**({"GLOO_SOCKET_IFNAME": interface} if interface else {}), "OMP_NUM_THREADS": "1", **environ}
    request = {
        "kind": kind,
        "backend": backend,
        "dtype": options.dtype,
        "first_rank": places.first,
        "ranks": places.here,
        "world_size": places.world_size,
        "first_device": places.first_device,
        "address": places.address,
        "hosts_store": places.hosts_store,
        "rank_environments": [shared_gpu_environment(environ, places.first + each) for each in range(places.here)],
        "timeout_seconds": max(MEETING_SECONDS, 4 * options.seconds),
        "collectives": collectives,
        "sizes": sizes,
        "groups": [{"name": each.name, "ranks": each.ranks} for each in groups],
        "seconds": options.seconds,
    }
    command = [sys.executable, "-m", "trimaran.machine.probe.measure_comm"]
    measured = run_measurement(command, environment=environment, console=console, where=WHERE, request=request)
    if places.first != 0:
        return None  # another process shows the result
    whole = replace(cluster, num_nodes=places.world_size // places.per_node, devices_per_node=places.per_node)
    result = _result(measured, groups, request, whole)
    variables = {name: value for name, value in sorted(environment.items()) if name.startswith(READ_BY_BACKENDS)}
    return result.model_copy(update={"environment": variables})


def find_places(options: CommOptions, cluster: Cluster, environ: Mapping[str, str]) -> CommPlaces:
    """Return which ranks run here: one of torchrun's, those of one of several nodes, or all of them."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        from trimaran.app.recipe.request import torchrun_number

        if options.ranks is not None or options.nodes > 1 or options.address:
            raise _wrong(
                "torchrun has started the ranks already", "--ranks", "leave out --ranks, --nodes and --address"
            )
        started = torchrun_number(environ, "WORLD_SIZE", most=1 << 20)
        rank = torchrun_number(environ, "RANK", most=started - 1, least=0)
        per_node = torchrun_number(environ, "LOCAL_WORLD_SIZE", most=started, default=1)
        local = torchrun_number(environ, "LOCAL_RANK", most=per_node - 1, least=0, default=0)
        store_port = torchrun_number(environ, "MASTER_PORT", most=(1 << 16) - 1)
        if started < 2 or started % per_node:
            raise _wrong(f"torchrun started {started} ranks, {per_node} of them here", "torchrun",
                         "start two or more ranks, equally many on each node")  # fmt: skip
        # torchrun's own process hosts the store, unless that was switched off.
        hosts_store = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return CommPlaces(first=rank, here=1, world_size=started, per_node=per_node, first_device=local,
                          address=f"{environ['MASTER_ADDR']}:{store_port}", hosts_store=hosts_store)  # fmt: skip
    is_cpu = cluster.device.traits.shares_cores
    here = options.ranks or (max(2, min(num_cores(), MAX_CPU_RANKS)) if is_cpu else cluster.devices_per_node)
    if options.nodes > 1 and options.ranks is None and is_cpu:
        here = 1  # a rank for each node shows the link between them
    shares = bool(shared_gpu_environment(environ, 0))
    if here > MAX_RANKS or (not is_cpu and not shares and here > cluster.devices_per_node):
        most = MAX_RANKS if is_cpu or shares else cluster.devices_per_node
        raise _wrong(f"{here} ranks are more than the {most} that can run here", "--ranks", f"use at most {most}")
    world_size = here * options.nodes
    if options.nodes == 1 and not options.address:
        if world_size < 2:
            raise _wrong("one rank has nobody to communicate with", "--ranks",
                         "use two or more; with --backend gloo they share the cores of this machine")  # fmt: skip
        return CommPlaces(first=0, here=here, world_size=world_size, per_node=here)
    host, _, port = options.address.rpartition(":")
    meets = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not (options.nodes > 1 and 0 <= options.node < options.nodes and meets):
        raise _wrong(f"--nodes {options.nodes} --node {options.node} --address '{options.address}' do not fit together",
                     "--nodes", "on node I of N: --nodes N --node I (from 0) --address HOST:PORT, where HOST is node 0 "
                     "and PORT is free there")  # fmt: skip
    return CommPlaces(first=options.node * here, here=here, world_size=world_size, per_node=here,
                      address=options.address, hosts_store=options.node == 0)  # fmt: skip


def _result(
    measured: Mapping[str, Any], groups: Sequence[NamedGroups], request: Mapping[str, Any], cluster: Cluster
) -> CommResult:
    kind, per_node = request["kind"], cluster.devices_per_node
    curves = []
    for each in groups:
        ranks = each.ranks[0]
        ring = ring_of(cluster.levels, len(ranks), ranks[1] - ranks[0])
        link = next(level for level in cluster.levels if level.name == ring.link)
        rates = {  # bus bandwidths that the planner expects; it has none for a broadcast
            "all_reduce": ring.reduce_bandwidth,
            "all_gather": ring.gather_bandwidth,
            "reduce_scatter": ring.gather_bandwidth,
            "all_to_all": ring.exchange_bandwidth,
            "send_recv": ring.send_bandwidth,
        }
        for collective in request["collectives"]:
            rows = [point for point in measured["points"]
                    if (point["group"], point["collective"]) == (each.name, collective)]  # fmt: skip
            if rows:
                planned = rates.get(collective)
                curves.append(CommCurve(
                    group=each.name, collective=collective, ranks=len(ranks), nodes=each.nodes,
                    groups=len(each.ranks), points=make_points(rows, kind=kind), link=link.name,
                    link_gb_per_second=link.bandwidth / 1e9,
                    planned_gb_per_second=planned / 1e9 if planned else None))  # fmt: skip
    pairs = [CommPair(ranks=pair["ranks"], nodes=1 + (pair["ranks"][0] // per_node != pair["ranks"][1] // per_node),
                      num_bytes=pair["bytes"], seconds=pair["seconds"]) for pair in measured["pairs"]]  # fmt: skip
    return CommResult(
        date=f"{date.today():%Y-%m-%d}",
        device=f"cpu, {num_cores()} cores" if DEVICE_TRAITS[kind].shares_cores else cluster.device.name,
        backend=request["backend"],
        dtype=request["dtype"],
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        hosts=tuple(measured["hosts"]),
        torch=measured["torch"],
        nccl=measured["nccl"],
        curves=tuple(curves),
        pairs=tuple(pairs),
        skipped=tuple(measured["skipped"]),
        wrong=tuple(measured["wrong"]),
    )

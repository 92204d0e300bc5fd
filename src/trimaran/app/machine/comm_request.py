"""Measures collectives between the ranks of this machine, of several nodes, or of an outside torchrun."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import psutil
from rich.console import Console

from trimaran.app.machine.comm_groups import (
    DEFAULT_SIZES,
    NamedGroups,
    default_groups,
    parse_collectives,
    parse_groups,
    parse_sizes,
)
from trimaran.app.machine.comm_links import planned_link
from trimaran.app.machine.machine_check import interface_to
from trimaran.app.machine.measure_process import run_measurement
from trimaran.core import Mesh, UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.launch.supervise.fork_server_process import shared_gpu_environment
from trimaran.machine import Cluster, detect, num_cores
from trimaran.machine.comm_result import CommCurve, CommPair, CommResult, make_points

WHERE = "trimaran bench comm"
DEFAULT_SECONDS = 20.0
MAX_CPU_RANKS, MAX_RANKS = 8, 64  # forked by default, and at most, on one machine
MEETING_SECONDS = 120.0  # for the other nodes to start
HOST_MEMORY_FRACTION = 0.5  # of what is free, for the messages of CPU ranks
READ_BY_BACKENDS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_", "UCX_", "RCCL_")
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element


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

    @property
    def is_first(self) -> bool:
        """Whether this process shows the result."""
        return self.first == 0


def measure_comm(options: CommOptions, environ: Mapping[str, str], console: Console) -> CommResult | None:
    """Return the measured collectives; None on all nodes and ranks but the first."""
    backend, cluster = _backend(options.backend, environ)
    places = find_places(options, cluster, environ)
    if options.dtype not in DTYPES:
        raise _wrong(f"'{options.dtype}' is not a dtype", "--dtype", f"use one of {', '.join(DTYPES)}")
    kind, shape = cluster.device.kind, {"world_size": places.world_size, "ranks_per_node": places.per_node}
    collectives, sizes = parse_collectives(options.collectives), parse_sizes(options.sizes or DEFAULT_SIZES[kind])
    text = options.groups or default_groups(**shape, mesh=options.mesh)
    groups = parse_groups(text, **shape, mesh=options.mesh)
    _refuse_too_large(max(sizes), places.here, kind)
    environment = _environment(places, environ)
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
    if not places.is_first:
        return None
    whole = replace(cluster, num_nodes=places.world_size // places.per_node, devices_per_node=places.per_node)
    result = _result(measured, groups, request, whole)
    return result.model_copy(update={"environment": _read_variables(environment)})


def find_places(options: CommOptions, cluster: Cluster, environ: Mapping[str, str]) -> CommPlaces:
    """Return which ranks run here: one of torchrun's, those of one of several nodes, or all of them."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return _torchrun_places(options, environ)
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


def _torchrun_places(options: CommOptions, environ: Mapping[str, str]) -> CommPlaces:
    from trimaran.app.recipe.request import torchrun_number

    if options.ranks is not None or options.nodes > 1 or options.address:
        raise _wrong("torchrun has started the ranks already", "--ranks", "leave out --ranks, --nodes and --address")
    world_size = torchrun_number(environ, "WORLD_SIZE", most=1 << 20)
    rank = torchrun_number(environ, "RANK", most=world_size - 1, least=0)
    per_node = torchrun_number(environ, "LOCAL_WORLD_SIZE", most=world_size, default=1)
    local = torchrun_number(environ, "LOCAL_RANK", most=per_node - 1, least=0, default=0)
    port = torchrun_number(environ, "MASTER_PORT", most=(1 << 16) - 1)
    if world_size < 2 or world_size % per_node:
        raise _wrong(f"torchrun started {world_size} ranks, {per_node} of them here", "torchrun",
                     "start two or more ranks, equally many on each node")  # fmt: skip
    # torchrun's own process hosts the store, unless that was switched off.
    hosts_store = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return CommPlaces(first=rank, here=1, world_size=world_size, per_node=per_node, first_device=local,
                      address=f"{environ['MASTER_ADDR']}:{port}", hosts_store=hosts_store)  # fmt: skip


def _backend(name: str, environ: Mapping[str, str]) -> tuple[str, Cluster]:
    """Return the backend and this machine: its GPUs with NCCL, its cores with gloo."""
    if name and name not in BACKENDS:
        raise _wrong(f"'{name}' is not a backend", "--backend", f"use one of {', '.join(BACKENDS)}")
    cluster = detect(visible_devices="" if name == "gloo" else environ.get("CUDA_VISIBLE_DEVICES"))
    backend = name or cluster.device.traits.backend
    if BACKENDS[backend] != cluster.device.kind:
        raise _wrong("NCCL needs GPUs, and this machine shows none", "--backend", "use --backend gloo")
    return backend, cluster


def _refuse_too_large(num_bytes: int, ranks: int, kind: str) -> None:
    free = psutil.virtual_memory().available
    if not DEVICE_TRAITS[kind].has_own_memory and 2 * num_bytes * ranks > HOST_MEMORY_FRACTION * free:
        raise _wrong(f"{ranks} ranks with two messages of {num_bytes / 2**20:,.0f} MiB each do not fit into half of "
                     f"the free memory, {free / 2**30:.1f} GiB", "--sizes", "end with a smaller size")  # fmt: skip


def _environment(places: CommPlaces, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: gloo uses the interface to the other nodes unless the user named one."""
    interface = interface_to(places.address) if places.address else "lo"
    return {**({"GLOO_SOCKET_IFNAME": interface} if interface else {}), "OMP_NUM_THREADS": "1", **environ}


def _read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(READ_BY_BACKENDS)}


def _result(
    measured: Mapping[str, Any], groups: Sequence[NamedGroups], request: Mapping[str, Any], cluster: Cluster
) -> CommResult:
    kind, per_node = request["kind"], cluster.devices_per_node
    curves = []
    for each in groups:
        for collective in request["collectives"]:
            rows = [point for point in measured["points"]
                    if (point["group"], point["collective"]) == (each.name, collective)]  # fmt: skip
            if rows:
                curves.append(CommCurve(
                    group=each.name, collective=collective, ranks=len(each.ranks[0]), nodes=each.nodes,
                    groups=len(each.ranks), points=make_points(rows, kind=kind),
                    **planned_link(cluster, each.ranks[0], collective)))  # fmt: skip
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


def _wrong(what: str, where: str, fix: str) -> UserError:
    return UserError("C010", what, where=f"{WHERE} {where}", fix=fix)

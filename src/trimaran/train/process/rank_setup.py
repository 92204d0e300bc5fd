"""A rank's process before training: its environment, process group, plug-ins, cores, and the modes of torch."""

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS, Recipe, UserError, plugin_records, templated, used_plugins
from trimaran.core.recipe import USED_BY_RANKS, load_used_plugins
from trimaran.machine import cores_near, pci_device
from trimaran.machine.host_limits import SYS, numa_node_of
from trimaran.parallel import all_gather_json
from trimaran.runs import closed_listeners
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink, supervisor_store

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process's ranks and world sizes, its device, and whether it may bind itself to the cores near that."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1
    binds_cores: bool = True


def read_rank_info(environment: Mapping[str, str], *, on_cpu: bool = False) -> RankInfo:
    """Return the rank that a launcher wrote into `environment`; without a launcher, rank 0 of 1.

    The device is this rank's GPU if the machine has any, unless `on_cpu`. With TRIMARAN_SHARE_GPUS=1 several ranks
    may use one GPU, see `launch/supervise/fork_server_process.py`.
    """
    local_rank = int(environment.get("LOCAL_RANK", 0))
    use_gpu = torch.cuda.is_available() and not on_cpu
    shares = use_gpu and environment.get("TRIMARAN_SHARE_GPUS") == "1"
    index = local_rank % torch.cuda.device_count() if shares else local_rank
    device = torch.device("cuda", index) if use_gpu else torch.device("cpu")
    return RankInfo(
        rank=int(environment.get("RANK", 0)),
        world_size=int(environment.get("WORLD_SIZE", 1)),
        local_rank=local_rank,
        device=device,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
        binds_cores=environment.get("TRIMARAN_BIND_CORES") != "0",
    )


def join_process_group(rank_info: RankInfo, link: SupervisorLink = NO_SUPERVISOR) -> None:
    """Initialise torch's process group, in the supervisor's store or at MASTER_ADDR and MASTER_PORT."""
    dist.set_debug_level_from_env()  # torch reads it when it is imported, which may have been in another process
    traits = DEVICE_TRAITS[rank_info.device.type]
    if not traits.shares_cores:
        torch.cuda.set_device(rank_info.device)
    rank, world_size = rank_info.rank, rank_info.world_size
    join = partial(dist.init_process_group, traits.group_backends, rank=rank, world_size=world_size, timeout=TIMEOUT)
    if world_size == 1:
        join(store=dist.HashStore())
    elif link.store:
        with closed_listeners():
            join(store=supervisor_store(link))
    else:
        join()


def agree_on_plugins(recipe: Recipe) -> None:
    """Load the recipe's plug-ins that ranks use.

    If a rank lacks one, cannot load it or has another version, all ranks raise the same UserError. Every rank must call
    it, after joining the process group.
    """
    if not used_plugins(recipe):
        return
    error: dict[str, Any] | None = None
    try:
        load_used_plugins(recipe, USED_BY_RANKS)
    except UserError as found:
        error = found.as_dict()
    on_ranks = [each for each in plugin_records(recipe) if each["kind"] in USED_BY_RANKS]
    answers = all_gather_json([error, on_ranks])
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise UserError(
                error["code"],
                error["what"],
                where=templated("{place}, on rank {rank}", place=error["where"], rank=rank),
                fix=error["fix"],
            )
    for rank, (_, others) in enumerate(answers):
        for first, other in zip(answers[0][1], others, strict=True):
            if first != other:
                has = [f"{each.get('distribution')} {each.get('version')}" for each in (first, other)]
                raise UserError(
                    "K078.ranks-differ",
                    where=templated("the {kind} '{name}'", kind=first["kind"], name=first["name"]),
                    first=has[0],
                    rank=rank,
                    other=has[1],
                )


def bind_cores(device: torch.device) -> dict[str, int]:
    """Bind all threads of this process to the NUMA node of its GPU. Returns what was bound, for the `start` event.

    Call it before threads and loader processes are started: they inherit it. A process that is already bound to one
    NUMA node stays as it is, and so does a machine with only one.
    """
    if DEVICE_TRAITS[device.type].shares_cores or not hasattr(os, "sched_setaffinity"):
        return {}
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these fields
    return bind_near(pci_device(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"))


def bind_near(folder: Path, *, sys: Path = SYS) -> dict[str, int]:
    """Bind this process to the NUMA node of a device, given its folder in sysfs."""
    cores = cores_near(folder, os.sched_getaffinity(0), sys)
    if not cores:
        return {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
    return {"numa_node": numa_node_of(folder), "cores": len(cores)}


log = logging.getLogger(__name__)


def set_expandable_segments(wanted: Literal["auto"] | bool, device: torch.device) -> None:
    """Let a GPU's allocator grow segments in place from now on, or not, `auto` as at the start.

    Segments with live tensors stay; free ones are given back.
    """
    if not DEVICE_TRAITS[device.type].has_own_memory:
        return
    at_start = _at_start()
    value = at_start if wanted == "auto" else wanted
    if value == _uses_expandable_segments():
        return
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change: Any = newer or torch.cuda.memory._set_allocator_settings  # both are private in torch
    change(f"expandable_segments:{value}")
    torch.cuda.empty_cache()
    log.info("expandable segments: %s", value)


@cache
def _at_start() -> bool:
    """Return the setting that the process was started with. The first call must be before any change."""
    return _uses_expandable_segments()


def _uses_expandable_segments() -> bool:
    """Return the setting in use. Only snapshots have it in every version of torch that we support."""
    snapshot: Any = torch.cuda.memory._snapshot()
    return bool(snapshot["allocator_settings"]["expandable_segments"])


def set_torch_modes(recipe: Recipe, device: torch.device) -> None:
    """Set torch's modes and the allocator's, as the recipe says. Anomaly mode leaves NaN to the guard."""
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(recipe.faults.debug, check_nan=False)
    set_expandable_segments(recipe.faults.expandable_segments, device)

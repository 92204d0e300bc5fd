"""Reads a worker's rank and device from the environment, and joins the process group."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.runs.gloo_listeners import closed_listeners
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
    may use one GPU, see `launch/supervise/shared_gpu.py`.
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
    """Initialise torch's default process group.

    Ranks meet in the supervisor's store or, without a supervisor, at MASTER_ADDR and MASTER_PORT. A single rank uses a
    store of its own.
    """
    dist.set_debug_level_from_env()  # torch reads it when it is imported, which may have been in another process
    traits = DEVICE_TRAITS[rank_info.device.type]
    if not traits.shares_cores:
        torch.cuda.set_device(rank_info.device)
    backend = traits.group_backends
    rank, world_size = rank_info.rank, rank_info.world_size
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    elif link.store:
        store = supervisor_store(link)
        with closed_listeners():
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT)

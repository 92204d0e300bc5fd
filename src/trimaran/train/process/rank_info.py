"""Where this worker stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.process.token_store import address_store

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process among the ranks, and the device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1


def read_rank_info(environment: Mapping[str, str], *, on_cpu: bool = False) -> RankInfo:
    """Return the place that a launcher wrote into `environment`; without one, the only rank there is.

    The device is this rank's GPU where there are any, unless the run asked for the CPU.
    """
    local_rank = int(environment.get("LOCAL_RANK", 0))
    use_gpu = torch.cuda.is_available() and not on_cpu
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    return RankInfo(
        rank=int(environment.get("RANK", 0)),
        world_size=int(environment.get("WORLD_SIZE", 1)),
        local_rank=local_rank,
        device=device,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
    )


def join(place: RankInfo, link: SupervisorLink = NO_SUPERVISOR) -> None:
    """Join the other ranks: in the supervisor's store or, without one, where the launcher's MASTER_ADDR and MASTER_PORT
    say. One rank meets nobody."""
    backend = "gloo"
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        backend = "cpu:gloo,cuda:nccl"
    if place.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    elif link.store:
        store = address_store(link)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)

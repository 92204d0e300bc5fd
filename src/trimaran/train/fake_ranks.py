"""One rank of a plan alone, under a fake process group of full size, whose collectives exchange nothing.

Shapes, memory and the rank's own computation are real; values that come from other ranks are not.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # private in torch; registers the backend `fake`

from trimaran.core import Plan, Recipe, refuse_missing_packages
from trimaran.nets import WeightsNeededError
from trimaran.parallel import RankMesh, build_mesh, forget_meshes
from trimaran.planner import isolates_documents
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.rank_networks import build_networks, refuse_unsavable

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class FakeRank:
    """A rank of a plan that runs alone: what the worker knows of itself, and its process groups."""

    info: RankInfo
    ranks: RankMesh


@contextmanager
def fake_rank(plan: Plan, rank: int, device: torch.device, *, backend: str = "fake") -> Iterator[FakeRank]:
    """Be `rank` of the plan inside the block, with all its process groups; none is left afterwards.

    This process must not be in a process group. `device` is the meta device, a CPU or a GPU. `backend` needs no other
    process: torch's fake one, or that of a rehearsal. A later block must not use a mesh or network of an earlier one.
    """
    assert not dist.is_initialized(), "this process is in a process group already"
    world_size = plan.mesh.world_size
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        on_meta = device.type == "meta"
        ranks = build_mesh(plan.mesh, device_type="cpu" if on_meta else device.type)
        info = RankInfo(rank=rank, world_size=world_size, local_rank=device.index or 0, device=device)
        yield FakeRank(info, replace(ranks, without_device=on_meta))
    finally:
        dist.destroy_process_group()
        forget_meshes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCheck:
    """Which ranks were built, of how many, and how long that took. `not_built` says why none could be."""

    ranks: tuple[int, ...]
    world_size: int
    seconds: float
    not_built: str = ""


def check_build(recipe: Recipe, plan: Plan) -> BuildCheck:
    """Build the first rank of the plan on the meta device, and with a pipeline the last; raise what the worker would.

    Only the config and the headers of weights are read. A model that transformers cannot build without its weights is
    not built.
    """
    started, world_size = time.monotonic(), plan.mesh.world_size
    refuse_missing_packages(plan)
    ranks = (0, world_size - 1) if plan.mesh.pp > 1 else (0,)
    try:
        for rank in ranks:
            with fake_rank(plan, rank, META) as fake:
                networks = build_networks(recipe, plan, fake.info, fake.ranks)
                refuse_unsavable(recipe, networks)
            if isolates_documents(recipe.data):
                networks[0].refuse_documents(recipe.data.seq_len)
    except WeightsNeededError as error:
        ranks, reason = (), str(error)
    else:
        reason = ""
    return BuildCheck(ranks=ranks, world_size=world_size, seconds=time.monotonic() - started, not_built=reason)

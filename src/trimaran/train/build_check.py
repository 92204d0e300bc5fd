"""Builds ranks of a plan without weights or other ranks, to refuse what the worker would refuse."""

import time
from dataclasses import dataclass

from trimaran.core import Plan, Recipe
from trimaran.core.engine_rules import refuse_missing_packages
from trimaran.nets.network import WeightsNeededError
from trimaran.planner.question import isolates_documents
from trimaran.train.fake_ranks import META, build_fake_rank, fake_rank
from trimaran.train.rank_networks import refuse_unsavable


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCheck:
    """Which ranks were built, of how many, and how long that took. `not_built` says why none could be."""

    ranks: tuple[int, ...]
    world_size: int
    seconds: float
    not_built: str = ""


def check_build(recipe: Recipe, plan: Plan) -> BuildCheck:
    """Build the first rank of the plan on the meta device, and with a pipeline also the last, under a fake group.

    Raises the UserError that the worker would raise. Nothing is read but the config and the headers of weights; a model
    that transformers cannot build without its weights is not built.
    """
    started, world_size = time.monotonic(), plan.mesh.world_size
    refuse_missing_packages(plan)
    ranks = (0, world_size - 1) if plan.mesh.pp > 1 else (0,)
    try:
        for rank in ranks:
            with fake_rank(plan, rank, META) as fake:
                networks = build_fake_rank(recipe, plan, fake)
                refuse_unsavable(recipe, networks)
            if isolates_documents(recipe.data):
                networks[0].refuse_documents(recipe.data.seq_len)
    except WeightsNeededError as error:
        ranks, reason = (), str(error)
    else:
        reason = ""
    return BuildCheck(ranks=ranks, world_size=world_size, seconds=time.monotonic() - started, not_built=reason)

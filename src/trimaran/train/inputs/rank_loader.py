"""The loader of a rank: which batches it loads, and how much of the machine it may use."""

import math
import os
from collections.abc import Callable
from pathlib import Path

from trimaran.core import Recipe
from trimaran.core.device_traits import DEVICE_TRAITS
from trimaran.data.feed import BatchFeed
from trimaran.data.loader import Loader
from trimaran.data.loader_tuner import LoaderLimits
from trimaran.hardware.host_limits import CGROUP, cpu_quota, free_bytes
from trimaran.train.process.rank_info import RankInfo


def build_loader(recipe: Recipe, rank_info: RankInfo, feed: Callable[[], BatchFeed], start: int) -> Loader:
    """Return a loader of the batches from step `start` on. `feed` is called now, because the quarantine may change."""
    return Loader(
        feed(),
        start_step=start,
        steps=recipe.train.steps,
        workers=recipe.data.workers,
        timeout_seconds=recipe.data.timeout_seconds,
        limits=rank_loader_limits(rank_info),
    )


def rank_loader_limits(rank_info: RankInfo, cgroup: Path = CGROUP) -> LoaderLimits:
    """Return this rank's fraction of the cores and the free memory of the machine, or of its container.

    One core is left for the rank itself, which computes on it or launches its device's kernels from it.
    """
    ranks = max(1, rank_info.local_world_size)
    return LoaderLimits(
        cores=max(0, _allowed_cores(cgroup) // ranks - 1),
        free_bytes=free_bytes(cgroup) // ranks,
        pin_memory=DEVICE_TRAITS[rank_info.device.type].has_own_memory,
    )


def _allowed_cores(cgroup: Path) -> int:
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return allowed if quota is None else min(allowed, max(1, math.floor(quota)))

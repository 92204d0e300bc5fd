"""What a rank's loader may take of its machine."""

import math
import os
from pathlib import Path

from trimaran.checkpoint.memory_budget import CGROUP, free_bytes
from trimaran.data.loader_tuner import LoaderLimits
from trimaran.train.process.rank_info import RankInfo


def room_of(place: RankInfo, cgroup: Path = CGROUP) -> LoaderLimits:
    """Return this rank's share of the cores and of the memory that are free now, in its container where it is in one.

    One core of the share is the rank's own: it computes there, or it feeds its device from there.
    """
    ranks = max(1, place.local_world_size)
    return LoaderLimits(
        cores=max(0, _cores(cgroup) // ranks - 1),
        free_bytes=free_bytes(cgroup) // ranks,
        pin_memory=place.device.type == "cuda",
    )


def _cores(cgroup: Path) -> int:
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(allowed, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return allowed

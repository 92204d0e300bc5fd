"""What a rank measures of itself besides the clock: memory, what the device computes, and how the ranks compare."""

import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trimaran.checkpoint.memory_budget import CGROUP
from trimaran.core import Plan, Recipe
from trimaran.nets import Network
from trimaran.train.metrics.rank_stats import RankStats

STATM = Path("/proc/self/statm")
PAGE = resource.getpagesize()


class MemoryMeter:
    """Reads what this rank holds of its device's memory, or of the host's on a CPU. Nothing waits for the device."""

    def __init__(self, device: torch.device, *, cgroup: Path = CGROUP) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self._total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_bytes(cgroup)

    def read(self) -> tuple[int, dict[str, Any]]:
        """Return the most bytes that this rank has ever held, and what `memory` in the metrics says of those of now."""
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            return _bytes(stats, "allocated_bytes", "peak"), of_allocator(stats) | {"total": self._total}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        try:
            return peak, {"allocated": resident_bytes(), "total": self._total}
        except (OSError, ValueError, IndexError):  # a system that does not tell: training goes on
            return peak, {"total": self._total}


def of_allocator(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the statistics of torch's CUDA allocator say of memory."""
    reserved = _bytes(stats, "reserved_bytes")
    return {
        "allocated": _bytes(stats, "allocated_bytes"),
        "reserved": reserved,
        "fragmentation": _bytes(stats, "inactive_split_bytes") / reserved if reserved else 0.0,
        "retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def _bytes(stats: Mapping[str, Any], name: str, when: str = "current") -> int:
    """Return one figure of the allocator's; it has none before anything was allocated."""
    return stats.get(name, {}).get("all", {}).get(when, 0)


def resident_bytes() -> int:
    """Return the memory of the host that this process holds; psutil takes several times as long to say so."""
    return int(STATM.read_bytes().split()[1]) * PAGE


def host_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of this machine, or of its container where that has less."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """Reads a step's meters, once its phases are known. Every rank reads every step."""

    plan: Plan
    memory: MemoryMeter
    spread: RankStats | None = None  # one rank has nobody to compare with
    lr_factors: Mapping[str, float]  # of each tower, where not all have the same learning rate

    def read(self, step: int, *, lr: float, tokens: int, phases: Mapping[str, float]) -> tuple[int, dict[str, Any]]:
        """Return the peak of this rank's memory, and what the step's line in the metrics says besides.

        `tokens` are those that this rank has loaded. What is told of all ranks, and how long rank 0 waited for the
        slowest of them, is of the step before.
        """
        peak, memory = self.memory.read()
        details: dict[str, Any] = {"memory": memory, "waits": waits(phases, 0.0)}
        if self.lr_factors:
            details["lrs"] = {tower: lr * factor for tower, factor in self.lr_factors.items()}
        details |= self._utilisation(sum(phases.values()))
        if self.spread is not None:
            ranks = self.spread.exchange(step, measures(phases, peak=peak, tokens=tokens))
            if ranks:
                details |= {"waits": waits(phases, ranks.pop("late_seconds")), "ranks": ranks}
        return peak, details

    def _utilisation(self, seconds: float) -> dict[str, float]:
        """Return what the devices computed of what they could have, with all that they computed twice."""
        told = self.plan.prediction
        peak = told.device_peak_flops * self.plan.mesh.world_size if told else 0.0
        return {"hfu": (told.flops_per_step + told.repeated_flops) / (seconds * peak)} if told and peak else {}


def build_meters(recipe: Recipe, plan: Plan, network: Network, device: torch.device) -> Meters:
    """Return the meters of this rank. The process group must be up."""
    return Meters(
        plan=plan,
        memory=MemoryMeter(device),
        spread=RankStats(pp=plan.mesh.pp) if dist.get_world_size() > 1 else None,
        lr_factors=lr_factors(recipe, network.towers),
    )


def lr_factors(recipe: Recipe, towers: Iterable[str]) -> dict[str, float]:
    """Return what the learning rate of each tower that is trained is of the schedule's; none, where all are alike."""
    asked, lr = recipe.train.optimizer.towers, recipe.train.lr
    if not any(each.lr is not None for each in asked.values()):
        return {}
    trained = [tower for tower in towers if tower not in recipe.model.freeze]
    own = {tower: asked[tower].lr for tower in trained if tower in asked}
    return {tower: (own.get(tower) or lr) / lr for tower in trained}


def waits(phases: Mapping[str, float], late: float) -> dict[str, float]:
    """Return what rank 0 waited for in a step, in which the slowest rank was `late` seconds later than it."""
    straggler = min(late, phases["comm"])
    return {"data": phases["data"], "comm": phases["comm"] - straggler, "straggler": straggler}


def measures(phases: Mapping[str, float], *, peak: int, tokens: int) -> dict[str, float]:
    """Return what a rank tells of its step: what it worked, loaded and waited for add up to it."""
    wait, data = phases["comm"], phases["data"]
    return {
        "busy_seconds": sum(phases.values()) - wait - data,
        "data_seconds": data,
        "wait_seconds": wait,
        "peak_bytes": peak,
        "tokens": tokens,
    }

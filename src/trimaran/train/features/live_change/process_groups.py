"""The process groups of a plan: which exist, whether the ranks are in step in them, and how to destroy them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d  # private in torch: the table of all groups


def known_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups that this rank is in, by name, without the default group."""
    world: Any = distributed_c10d._world
    return {name: group for group, name in world.pg_names.items() if group is not dist.group.WORLD}


def destroy_groups(groups: Iterable[str]) -> None:
    """Destroy these groups, those that were made last first. All their ranks must do so, and nobody uses them."""
    found = known_groups()
    for name in sorted({*groups} & found.keys(), key=_by_age, reverse=True):
        dist.destroy_process_group(found[name])


def collective_counts() -> dict[str, list[int]]:
    """Return for each group of this rank how many collectives it has started there, by backend.

    If these are the same on all ranks, no rank waits for another in a collective that the other never starts.
    """
    groups = known_groups() | {"": dist.group.WORLD}
    return {name: [*_counts(group)] for name, group in groups.items()}


def are_in_step(counts: Sequence[dict[str, list[int]]]) -> bool:
    """Return whether the ranks, each with its `collective_counts`, have started the same collectives."""
    first: dict[str, list[int]] = {}
    return all(first.setdefault(name, numbers) == numbers for rank in counts for name, numbers in rank.items())


def _counts(group: Any) -> Iterable[int]:
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # it has no backend for this kind of device
            yield int(group._get_backend(torch.device(kind))._get_sequence_number_for_group())


def _by_age(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (0, name)

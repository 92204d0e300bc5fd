"""Checks at intervals that replicated weights are equal bit by bit, to find silent data corruption.

Replicas must be equal, since every rank applies the same gradients to the same weights. Memory, devices and links can
corrupt them without an error. A checksum finds any single bit flip, but not two swapped values. With three replicas or
more the one that differs is at fault; with two, both are suspect.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.parallel.comm.json_exchange import broadcast_json

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name of torch 2.13
CHECK_EVERY_STEPS = 100
MAX_REPORTED_KEYS = 8
INTEGER_BY_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # size in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """Replicas that are no longer equal.

    `ranks` differ from the majority. Without a majority they are all ranks that hold the tensor, and `known` is False.
    `since` is the last step at which all replicas were equal.
    """

    step: int
    ranks: tuple[int, ...]
    known: bool
    keys: tuple[str, ...]
    since: int

    def as_dict(self) -> dict[str, Any]:
        """Return the data of an `error` event."""
        who = (
            "more than one rank holds" if not self.known else "one rank holds" if len(self.ranks) == 1 else "ranks hold"
        )
        message = f"replicas differ: {who} other bits of {', '.join(self.keys[:2])} than the rest"
        return {
            "type": "ReplicasDiffer",
            "message": message,
            "cause": "numeric",
            "ranks": list(self.ranks),
            "keys": list(self.keys),
            "since": self.since,
        }


CompareReplicas = Callable[[int], ReplicaDifference | None]
"""Takes the number of steps done. Every rank must call it with the same numbers."""


class ReplicaCheck:
    """Compares the weights of all ranks every `every` steps. Every rank must call `check` with the same steps."""

    def __init__(
        self, shards: Callable[[], Sequence[TensorShard]], *, device: torch.device, every: int = CHECK_EVERY_STEPS
    ) -> None:
        self._shards, self._device, self._every = shards, device, every
        self._replicated: bool | None = None  # known after the first check
        self._since, self._last = 0, -1

    def check(self, step: int) -> ReplicaDifference | None:
        """Return what differs after `step`, the same on all ranks, or None. Costs nothing without replicas."""
        if self._last == -1 or step <= self._last:
            self._since = step - 1  # a start or a rewind: all ranks restored the same state
        self._last = step
        if step % self._every or self._replicated is False or dist.get_world_size() == 1:
            return None
        weights = [each for each in self._shards() if _is_weight(each)]
        table = _gather(weights, self._device)
        self._replicated = bool((_num_holders(table[..., 0]) > 1).any())
        differing, known, ids = find_differing_ranks(table)
        if not differing:
            self._since = step
            return None
        keys = tuple(each.key for each in weights if _shard_id(each) in ids)[:MAX_REPORTED_KEYS]
        # Pipeline stages hold different keys, so those of one differing rank go to all.
        keys = tuple(broadcast_json(keys, src=differing[0]))
        return ReplicaDifference(step=step, ranks=differing, known=known, keys=keys, since=self._since)


def find_differing_ranks(table: np.ndarray) -> tuple[tuple[int, ...], bool, frozenset[int]]:
    """Return the ranks that differ, whether a majority differs from them, and the ids of the shards that differ.

    `table` is int64 [ranks, shards, 2]: id and checksum of each shard. The id 0 is padding.
    """
    ids, checksums = table[..., 0], table[..., 1]
    differing: set[int] = set()
    known, differing_ids = True, set()
    for shard_id in _unequal(ids, checksums):
        ranks, columns = np.nonzero(ids == shard_id)
        votes = Counter(checksums[ranks, columns].tolist())
        (majority, count), *others = votes.most_common()
        tie = bool(others) and others[0][1] == count
        known &= not tie
        by_rank = zip(ranks, checksums[ranks, columns], strict=True)
        differing |= {int(rank) for rank, value in by_rank if tie or value != majority}
        differing_ids.add(int(shard_id))
    return tuple(sorted(differing)), known, frozenset(differing_ids)


def _unequal(ids: np.ndarray, checksums: np.ndarray) -> list[int]:
    """Return the ids whose checksums are not all equal."""
    order = np.argsort(ids, axis=None, kind="stable")
    flat_ids, flat_checksums = ids.reshape(-1)[order], checksums.reshape(-1)[order]
    starts = np.flatnonzero(np.r_[True, flat_ids[1:] != flat_ids[:-1]])
    low, high = np.minimum.reduceat(flat_checksums, starts), np.maximum.reduceat(flat_checksums, starts)
    return [int(shard_id) for shard_id in flat_ids[starts[low != high]] if shard_id != 0]


def _num_holders(ids: np.ndarray) -> np.ndarray:
    """Return how many ranks hold each shard."""
    without_padding = ids[ids != 0]
    if not without_padding.size:
        return np.zeros(1, dtype=np.int64)
    return np.unique(without_padding, return_counts=True)[1]


def _gather(shards: Sequence[TensorShard], device: torch.device) -> np.ndarray:
    """Return id and checksum of all shards of all ranks: [ranks, shards, 2], padded with zeros."""
    length = torch.tensor(len(shards), device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    mine = torch.zeros(int(length), 2, dtype=torch.int64, device=device)
    if shards:
        mine[: len(shards), 0] = torch.tensor([_shard_id(each) for each in shards], device=device)
        mine[: len(shards), 1] = torch.stack([bit_checksum(each).to(device) for each in _tensors(shards)])
    gathered = torch.empty(dist.get_world_size() * mine.shape[0], 2, dtype=torch.int64, device=device)
    gather_single(gathered, mine)
    return gathered.reshape(-1, *mine.shape).cpu().numpy()


def _tensors(shards: Sequence[TensorShard]) -> list[Tensor]:
    tensors = [each.tensor for each in shards if isinstance(each.tensor, Tensor)]
    assert len(tensors) == len(shards), "weights that are split into two halves are never replicated"
    return tensors


def bit_checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits, read as integers: a scalar on the tensor's device."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = next(size for size in INTEGER_BY_SIZE if flat.nbytes % size == 0)  # the largest that fits is the fastest
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()  # all ranks must sum the same integers, wherever the tensor starts in its storage
    return flat.view(torch.uint8).view(INTEGER_BY_SIZE[size]).sum(dtype=torch.int64)


def _is_weight(shard: TensorShard) -> bool:
    """Return whether a shard is compared. Buffers that forward changes may differ; frozen weights must not.

    The last synchronised weights of replicas that train alone must be equal, too.
    """
    is_weight = shard.key.startswith(("model/", "outer/weights/"))
    return is_weight and not shard.changed_by_forward and shard.tensor.numel() > 0


def _shard_id(shard: TensorShard) -> int:
    """Return a number for the shard, the same on all ranks that hold it, and never 0."""
    text = f"{shard.key} {shard.start} {tuple(shard.tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1

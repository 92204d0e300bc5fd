"""Finds silent corruption of weights and optimizer states: shards that change between updates, replicas that differ.

Shards: under sharding each rank holds the only copy of its shards, so there is nothing to compare them with. But only
an update writes to them. Their checksums are computed right after an update and again right before the next one; if
they differ, a bit has changed at rest. A checksum finds any single flipped bit. An update that computes a wrong value
is not found.

Replicas: they must be equal, since every rank applies the same gradients to the same weights. Memory, devices and links
can corrupt them without an error. A checksum finds any single bit flip, but not two swapped values. With three replicas
or more the one that differs is at fault; with two, both are suspect.
"""

import hashlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import DEVICE_TRAITS
from trimaran.parallel import TensorChecksums, TensorShard, addresses_of, broadcast_json, can_sum, store_of

log = logging.getLogger(__name__)

gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name of torch 2.13
CHECK_EVERY_STEPS = 100
MAX_REPORTED_KEYS = 8
INTEGER_BY_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # size in bytes
MAX_FRACTION = 0.01
"""The largest fraction of the time that checksums may take. If all of them take longer, each step checks a part."""
SMALL_BYTES = 32 << 10
"""Tensors in host memory up to this size are copied and compared, which is faster than a checksum of each."""
MAX_COPIED_BYTES = 4 << 20  # the most that copies of small tensors take. The rest get checksums.
DEVICE_BYTES_PER_SECOND = 1e12  # of reductions on a GPU, whose time the host cannot measure without waiting
FIRST_STEPS = 5  # FSDP moves tensors at the first steps, and optimizers create their states
REVIEW_STEPS = 100
HALVES = ("upper", "lower")  # of a weight that is split into two tensors
Contents = tuple[bytes, list[int], Tensor | None]
"""Small tensors as they are, checksums of larger ones in host memory, and a tensor of the checksums of all others."""


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
        who = "more than one rank holds"
        if self.known:
            who = "one rank holds" if len(self.ranks) == 1 else "ranks hold"
        message = f"replicas differ: {who} other bits of {', '.join(self.keys[:2])} than the rest"
        facts = {"ranks": list(self.ranks), "keys": list(self.keys), "since": self.since}
        return {"type": "ReplicasDiffer", "message": message, "cause": "numeric", **facts}


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
        # Not buffers that forward changes, nor weights that differ by design.
        keyed = (each for each in self._shards() if each.key.startswith(("model/", "outer/weights/")))
        weights = [each for each in keyed if not each.changed_by_forward and each.tensor.numel() > 0]
        device = self._device
        length = torch.tensor(len(weights), device=device)
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        mine = torch.zeros(int(length), 2, dtype=torch.int64, device=device)
        if weights:
            tensors = [each.tensor for each in weights if isinstance(each.tensor, Tensor)]
            assert len(tensors) == len(weights), "weights that are split into two halves are never replicated"
            mine[: len(weights), 0] = torch.tensor([_shard_id(each) for each in weights], device=device)
            mine[: len(weights), 1] = torch.stack([bit_checksum(each).to(device) for each in tensors])
        gathered = torch.empty(dist.get_world_size() * mine.shape[0], 2, dtype=torch.int64, device=device)
        gather_single(gathered, mine)
        table = gathered.reshape(-1, *mine.shape).cpu().numpy()
        ids = table[..., 0]
        _, num_holders = np.unique(ids[ids != 0], return_counts=True)  # 0 is padding
        self._replicated = bool((num_holders > 1).any())
        differing, known, shards = find_differing_ranks(table)
        if not differing:
            self._since = step
            return None
        keys = tuple(each.key for each in weights if _shard_id(each) in shards)[:MAX_REPORTED_KEYS]
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
    order = np.argsort(ids, axis=None, kind="stable")
    flat_ids, flat_checksums = ids.reshape(-1)[order], checksums.reshape(-1)[order]
    starts = np.flatnonzero(np.r_[True, flat_ids[1:] != flat_ids[:-1]])
    low, high = np.minimum.reduceat(flat_checksums, starts), np.maximum.reduceat(flat_checksums, starts)
    for shard_id in [int(shard_id) for shard_id in flat_ids[starts[low != high]] if shard_id != 0]:
        ranks, columns = np.nonzero(ids == shard_id)
        votes = Counter(checksums[ranks, columns].tolist())
        (majority, count), *others = votes.most_common()
        tie = bool(others) and others[0][1] == count
        known &= not tie
        by_rank = zip(ranks, checksums[ranks, columns], strict=True)
        differing |= {int(rank) for rank, value in by_rank if tie or value != majority}
        differing_ids.add(int(shard_id))
    return tuple(sorted(differing)), known, frozenset(differing_ids)


def bit_checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits, read as integers: a scalar on the tensor's device."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = next(size for size in INTEGER_BY_SIZE if flat.nbytes % size == 0)  # the largest that fits is the fastest
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()  # all ranks must sum the same integers, wherever the tensor starts in its storage
    return flat.view(torch.uint8).view(INTEGER_BY_SIZE[size]).sum(dtype=torch.int64)


def _shard_id(shard: TensorShard) -> int:
    """Return a number for the shard, the same on all ranks that hold it, and never 0."""
    text = f"{shard.key} {shard.start} {tuple(shard.tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTensor:
    """A tensor to check. `flat` is its memory as bytes if it is contiguous host memory."""

    key: str
    tensor: Tensor
    flat: np.ndarray | None


class ShardPart:
    """Some tensors of this rank, whose memory can be recorded and compared."""

    def __init__(self, tensors: Sequence[CheckedTensor]) -> None:
        self._small: list[CheckedTensor] = []
        self._on_host: list[CheckedTensor] = []
        self._others: list[CheckedTensor] = []  # first those that one kernel reads, then the rest
        self._buffers: list[memoryview] = []
        self._words: list[np.ndarray] = []
        copied_bytes = 0
        for each in tensors:
            if each.flat is None:
                self._others.append(each)
            elif each.flat.nbytes <= SMALL_BYTES and copied_bytes + each.flat.nbytes <= MAX_COPIED_BYTES:
                self._small.append(each)
                self._buffers.append(each.flat.data)
                copied_bytes += each.flat.nbytes
            else:
                self._on_host.append(each)
                words = (np.dtype(name) for name in ("i8", "i4", "i2", "u1"))  # the widest is the fastest
                address, size = each.flat.ctypes.data, each.flat.nbytes
                widest = next(word for word in words if size % word.itemsize == 0 and address % word.itemsize == 0)
                self._words.append(each.flat.view(widest))
        self._others.sort(key=lambda each: not can_sum(each.tensor))
        batched = [each.tensor for each in self._others if can_sum(each.tensor)]
        self._rest = [each.tensor for each in self._others[len(batched) :]]
        self._checksums = TensorChecksums(batched) if batched else None

    def record(self) -> Contents:
        """Return the contents: small tensors as they are, checksums of the others; those of a GPU stay there."""
        sums = [] if self._checksums is None else [self._checksums.compute()]
        sums += [torch.stack([bit_checksum(each) for each in self._rest])] if self._rest else []
        checksums = torch.cat(sums) if len(sums) > 1 else sums[0] if sums else None
        return b"".join(self._buffers), [int(np.add.reduce(each, dtype=np.int64)) for each in self._words], checksums

    def changed_keys(self, before: Contents, after: Contents) -> list[str]:
        """Return the keys of the tensors that differ between two records. Waits for the device."""
        keys, offset = [], 0
        for each, buffer in zip(self._small, self._buffers, strict=True):
            window = slice(offset, offset := offset + buffer.nbytes)
            keys += [each.key] if before[0][window] != after[0][window] else []
        keys += [each.key for each, a, b in zip(self._on_host, before[1], after[1], strict=True) if a != b]
        if before[2] is not None and after[2] is not None:
            differs = (before[2] != after[2]).tolist()
            keys += [each.key for each, changed in zip(self._others, differs, strict=True) if changed]
        return keys


class ShardCheck:
    """Checks that nothing but updates changes this rank's weights and optimizer states. It never waits for the device.

    Call `record` after every update and `verify` before the next one. Buffers, which forward may change, are left out,
    and so are tensors on disk and, beside a GPU, in host memory: they may still be written after an update has
    returned. A tensor that has changed at the first check of a start is left out with a warning: the model's own code
    writes to it. Checks take at most `max_fraction` of the time; 0 is none, and with 1 every step checks everything.
    """

    def __init__(
        self,
        shards: Callable[[], Sequence[TensorShard]],
        *,
        device: torch.device,
        max_fraction: float = MAX_FRACTION,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._shards, self._device, self._max_fraction, self._now = shards, device, max_fraction, now
        self._parts: list[ShardPart] = []
        self._part: ShardPart | None = None
        self._before: Contents = (b"", [], None)
        self._verified: deque[tuple[ShardPart, Contents, Contents]] = deque(maxlen=2)
        self._left_out: set[str] = set()
        self._weights: Sequence[Tensor] = ()
        self._addresses: list[int] = []  # of the weights at the last record
        self._num_records, self._began_step = 0, 0.0
        self._check_seconds = self._step_seconds = 0.0  # since the last review; of checks as if each checked all

    @property
    def num_parts(self) -> int:
        """How many steps it takes to check everything once: each step checks a part. 1: every step checks all."""
        return len(self._parts)

    def record(self, weights: Sequence[Tensor] = ()) -> None:
        """Record the contents after an update.

        If one of these weights is elsewhere at `verify`, nothing is compared: what was recorded is no longer in use.
        """
        if not self._max_fraction:
            return
        began = self._now()
        self._step_seconds += began - self._began_step
        self._began_step = began
        addresses = addresses_of(weights)
        moved = addresses != self._addresses
        self._weights, self._addresses = weights, addresses
        is_review = self._num_records <= FIRST_STEPS or self._num_records % REVIEW_STEPS == 0
        if moved or is_review:
            count_parts = self._review_num_parts if is_review else lambda _: max(1, len(self._parts))
            shards = [shard for shard in self._shards() if shard.key not in self._left_out]
            tensors = [each for shard in shards for each in checked_tensors(shard, self._device)]
            self._parts = split_evenly(tensors, count_parts(tensors)) if tensors else []
            began = self._now()  # this is rare, and says nothing about the cost of a check
        self._num_records += 1
        if self._parts:
            self._part = self._parts[self._num_records % len(self._parts)]
            self._before = self._part.record()
        self._check_seconds += (self._now() - began) * len(self._parts)

    def verify(self) -> Tensor | None:
        """Return 1.0 on the device if the recorded contents have changed, else 0.0; None if nothing is recorded."""
        if self._part is None or self._addresses != addresses_of(self._weights):
            self._part = None
            return None
        began, part, before = self._now(), self._part, self._before
        after = part.record()
        changed = torch.full((), float(before[:2] != after[:2]), device=self._device)
        if not self._verified:
            keys = part.changed_keys(before, after)
            if keys:
                log.warning("not checked for flipped bits, as the model itself changes them: %s", ", ".join(keys))
                self._left_out |= {*keys}
            changed.zero_()
        elif before[2] is not None and after[2] is not None:
            changed = torch.maximum(changed, (before[2] != after[2]).any().to(changed))
        self._verified.append((part, before, after))
        self._part = None
        self._check_seconds += (self._now() - began) * len(self._parts)
        return changed

    def forget(self) -> None:
        self._part = None

    def changed_keys(self) -> list[str]:
        """Return the keys of the tensors that had changed at the last two calls of `verify`. Waits for the device.

        The result of a step is read one step later, so that the last call may be that of the step after it.
        """
        keys = [key for part, before, after in self._verified for key in part.changed_keys(before, after)]
        return [key for key in keys if key not in self._left_out]

    def _review_num_parts(self, tensors: Sequence[CheckedTensor]) -> int:
        """Return into how many parts to split, so that checks take no more than their time."""
        num_parts = max(1, len(self._parts))
        if self._num_records >= FIRST_STEPS:
            on_device = 2 / DEVICE_BYTES_PER_SECOND if DEVICE_TRAITS[self._device.type].has_own_memory else 0.0
            steps = FIRST_STEPS - 1 if self._num_records == FIRST_STEPS else REVIEW_STEPS
            device_seconds = steps * on_device * sum(each.tensor.nbytes for each in tensors)
            fraction = (self._check_seconds + device_seconds) / max(1e-9, self._step_seconds)
            num_parts = max(1, min(math.ceil(fraction / self._max_fraction), len(tensors)))
        if self._num_records in (1, FIRST_STEPS) or self._num_records % REVIEW_STEPS == 0:
            self._check_seconds = self._step_seconds = 0.0  # the first step and its check are warm-up
        return num_parts


def split_evenly(tensors: Sequence[CheckedTensor], num_parts: int) -> list[ShardPart]:
    total, parts, done = sum(each.tensor.nbytes for each in tensors), [[] for _ in range(num_parts)], 0
    for each in tensors:
        parts[min(num_parts - 1, done * num_parts // max(1, total))].append(each)
        done += each.tensor.nbytes
    return [ShardPart(each) for each in parts if each]


def checked_tensors(shard: TensorShard, device: torch.device) -> list[CheckedTensor]:
    """Return the tensors that hold a shard: two halves if it is split, none if it is not checked."""
    if shard.changed_by_forward:
        return []
    halves = shard.tensor if isinstance(shard.tensor, Tensor) else (getattr(shard.tensor, half) for half in HALVES)
    tensors = [each.detach() for each in ([halves] if isinstance(halves, Tensor) else halves)]
    checked = []
    for each in tensors:
        if each.device.type == device.type and each.numel() and store_of(each) is None:
            on_host = each.is_cpu and each.is_contiguous()
            flat = each.reshape(-1).view(torch.uint8).numpy() if on_host else None
            checked.append(CheckedTensor(key=shard.key, tensor=each, flat=flat))
    return checked

"""Finds memory of this rank that changes between two updates: silent corruption of weights and optimizer states.

Under sharding each rank holds the only copy of its shards, so there is nothing to compare them with. But only an update
writes to them. Their checksums are computed right after an update and again right before the next one; if they differ,
a bit has changed at rest. A checksum finds any single flipped bit. An update that computes a wrong value is not found.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core.device_traits import DEVICE_TRAITS
from trimaran.parallel.batched.address_table import addresses_of
from trimaran.parallel.batched.tensor_checksums import TensorChecksums, can_sum
from trimaran.parallel.memory.tensors_on_disk import store_of
from trimaran.train.health.replica_check import bit_checksum

log = logging.getLogger(__name__)

MAX_FRACTION = 0.01
"""The largest fraction of the time that checksums may take. If all of them take longer, each step checks a part."""
SMALL_BYTES = 32 << 10
"""Tensors in host memory up to this size are copied and compared, which is faster than a checksum of each."""
MAX_COPIED_BYTES = 4 << 20
"""The most that copies of small tensors take. The rest get checksums."""
DEVICE_BYTES_PER_SECOND = 1e12  # of reductions on a GPU, whose time the host cannot measure without waiting
FIRST_STEPS = 5  # FSDP moves tensors at the first steps, and optimizers create their states
REVIEW_STEPS = 100
HALVES = ("upper", "lower")  # of a weight that is split into two tensors
Contents = tuple[bytes, list[int], Tensor | None]
"""Small tensors as they are, checksums of larger ones in host memory, and a tensor of the checksums of all others."""


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
                self._words.append(_words(each.flat))
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
            self._split(self._review_num_parts if is_review else lambda _: max(1, len(self._parts)))
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
            self._leave_out(part.changed_keys(before, after))
            changed.zero_()
        elif before[2] is not None and after[2] is not None:
            changed = torch.maximum(changed, (before[2] != after[2]).any().to(changed))
        self._verified.append((part, before, after))
        self._part = None
        self._check_seconds += (self._now() - began) * len(self._parts)
        return changed

    def forget(self) -> None:
        """Forget what was recorded: the state is being restored."""
        self._part = None

    def changed_keys(self) -> list[str]:
        """Return the keys of the tensors that had changed at the last two calls of `verify`. Waits for the device.

        The result of a step is read one step later, so that the last call may be that of the step after it.
        """
        keys = [key for part, before, after in self._verified for key in part.changed_keys(before, after)]
        return [key for key in keys if key not in self._left_out]

    def _leave_out(self, keys: Sequence[str]) -> None:
        if keys:
            log.warning("not checked for flipped bits, as the model itself changes them: %s", ", ".join(keys))
            self._left_out |= {*keys}

    def _split(self, count_parts: Callable[[Sequence[CheckedTensor]], int]) -> None:
        """Find the tensors, and split them into parts."""
        shards = [shard for shard in self._shards() if shard.key not in self._left_out]
        tensors = [each for shard in shards for each in checked_tensors(shard, self._device)]
        self._parts = split_evenly(tensors, count_parts(tensors)) if tensors else []

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
    """Return the tensors in parts of similar size, in order."""
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
    return [CheckedTensor(key=shard.key, tensor=each, flat=_flat_bytes(each)) for each in tensors
            if each.device.type == device.type and each.numel() and store_of(each) is None]  # fmt: skip


def _flat_bytes(tensor: Tensor) -> np.ndarray | None:
    """Return the memory of a contiguous tensor on the host as bytes; None for any other."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return None
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _words(flat: np.ndarray) -> np.ndarray:
    """Return the bytes as the widest integers that fit."""
    for dtype in (np.int64, np.int32, np.int16):
        size = np.dtype(dtype).itemsize
        if flat.nbytes % size == 0 and flat.ctypes.data % size == 0:
            return flat.view(dtype)
    return flat

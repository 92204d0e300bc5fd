"""Copies a rank's share of the state to memory slots, from host memory."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import CopyMetadata, MemorySlot, encode_items
from trimaran.parallel import RankShare, ShareItem, SplitWeight, TensorShard, copy_values, item_values, item_view

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from trimaran.checkpoint.device_copier import DeviceCopier

Pairs = tuple[list[Tensor], list[Tensor | SplitWeight]]  # targets and sources of copies
SourcePairs = list[tuple[ShareItem, Tensor | SplitWeight]]


class Copier:
    """Copies this rank's share of the state to memory slots. This class waits for each copy."""

    allocates_in_background = False  # whether a thread may still be allocating the slots after `__init__` has returned

    def __init__(self, share: RankShare) -> None:
        self.share, self.items = share, encode_items(share.items)
        self.stall_seconds = 0.0
        """How long the last copy stalled training: the host's time, and on a GPU the wait for the last timed copy."""
        self.commit_seconds = 0.0
        """How long after its start the last copy was committed; 0.0 if that was before `copy` returned."""
        self.has_committed = False  # whether any copy has been committed
        self._shards: Sequence[TensorShard] = ()
        self._sources: SourcePairs = []
        self._views: dict[MemorySlot, tuple[Pairs, Pairs]] = {}
        """For each slot what to copy at each copy, and the frozen tensors, which are copied only the first time."""
        self._filled: set[MemorySlot] = set()
        self._num_copies = 0

    def prepare(self, slots: Sequence[MemorySlot], shards: Sequence[TensorShard]) -> None:
        """Prepare copies of `shards` to `slots`, so that the first ones do not take longer than later ones."""
        for slot in slots:
            self._views_of(slot, shards)

    def copy(self, slot: MemorySlot, metadata: CopyMetadata, shards: Sequence[TensorShard]) -> None:
        """Copy the values of `shards` to `slot`. They must not change before `before_update` is called."""
        began = time.perf_counter()
        slot.invalidate()
        trained, frozen = self._views_of(slot, shards)
        copy_pairs(trained)
        if slot not in self._filled:
            self._filled.add(slot)
            copy_pairs(frozen)
        # A copy to pageable memory usually has synchronized, but CUDA does not promise it.
        if any(each.tensor.is_cuda for each in shards):
            torch.cuda.current_stream().synchronize()
        slot.commit(metadata, self.items, self.share.num_bytes)
        self.has_committed = True
        self._num_copies += 1
        self.stall_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Make later changes of the state wait for the copy. Must be called before every update."""

    def wait(self) -> None:
        """Return when the last copy is committed."""

    def device_waits(self) -> list[float]:
        """Return how many seconds the GPU waited for each copy, in order; each copy once, when that is known."""
        num_copies, self._num_copies = self._num_copies, 0
        return [0.0] * num_copies

    @property
    def is_ready(self) -> bool:
        """Whether it is known if there is memory to copy to."""
        return True

    def wait_ready(self) -> bool:
        """Return whether there is memory to copy to, as soon as that is known."""
        return True

    @property
    def pinned(self) -> "DeviceCopier | None":
        """This copier, if it has pinned memory that another one can use."""
        return None

    def release(self) -> None:
        """Release everything but the slots. No copy may follow."""

    def _views_of(self, slot: MemorySlot, shards: Sequence[TensorShard]) -> tuple[Pairs, Pairs]:
        if shards is not self._shards:  # tensors have moved
            self._shards, self._views, self._filled = shards, {}, set()
            self._sources = list(zip(self.share.items, item_values(self.share, shards), strict=True))
        if slot not in self._views:
            trained, frozen = (
                self._pairs_of(slot, [each for each in self._sources if each[0].frozen == flag])
                for flag in (False, True)
            )
            self._views[slot] = trained, frozen
        return self._views[slot]

    def _pairs_of(self, slot: MemorySlot, sources: SourcePairs) -> Pairs:
        """Return the parts of `slot` for these items, and their values."""
        return [item_view(slot.data, item) for item, _ in sources], [values for _, values in sources]


@torch.no_grad()
def copy_pairs(pairs: Pairs) -> None:
    """Copy the sources to the targets; from a GPU to pinned memory on the current stream, without waiting."""
    targets, sources = [], []
    for target, values in zip(*pairs, strict=True):
        if isinstance(values, Tensor):
            targets.append(target)
            sources.append(values)
        else:
            copy_values(values, target, non_blocking=True)
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)

"""What the loops of one training share: the ranks, the rows that this rank works on, and the order of calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trimaran.core import UserError
from trimaran.loop.batch_agreement import BatchAgreement, as_tree
from trimaran.loop.call_order import CallOrder

ROW_STATE = ("is_padding", "any_padding", "is_evaluating", "local_batch", "local_rows", "min_local_rows",
             "max_local_rows")  # fmt: skip


class LoopContext:
    """The state that several loops (a generator's and a discriminator's) have in common.

    `is_padding`: this rank has no rows of the current batch. It works on a copy of one, which counts nothing, since the
    other ranks need it in their collectives. `any_padding`: some rank has none. `is_synced`: gradients are reduced in
    the current backward. `num_dealt` counts the batches and micro-batches that were dealt.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.world_size = device, dist.get_rank(), dist.get_world_size()
        self.calls = CallOrder()
        self._agreement = BatchAgreement(self.calls)
        self.set_syncs: list[Callable[[bool], None]] = []
        self.step_hooks: list[Callable[[], None]] = []
        self.num_steps = 0
        self.is_padding = self.any_padding = self.is_evaluating = False
        self.is_synced = True
        self.num_dealt = 0
        self.local_batch: Any = None  # the latest batch of a loader, which holds this rank's rows only
        self.local_rows = self.min_local_rows = self.max_local_rows = 0

    def set_sync(self, is_last: bool) -> None:
        """Say whether the next backward is the last one before a step."""
        self.is_synced = is_last
        self.num_dealt += 1
        for set_sync in self.set_syncs:
            set_sync(is_last)

    def set_counted(self, is_counted: bool) -> None:
        self.is_padding = not is_counted

    def rows_of(self, batch: Any, start: int, stop: int) -> Any:
        """Return this rank's part of the rows from `start` to `stop` of a global batch, on the device."""
        part = part_of(stop - start, self.rank, self.world_size)
        self.any_padding = stop - start < self.world_size
        return self._take(batch, start + part.start, start + part.stop, instead=start)

    def local_rows_of(self, batch: Any, start: int, stop: int) -> Any:
        """Return the rows from `start` to `stop` of a batch that holds only this rank's rows."""
        self.any_padding = start >= self.min_local_rows
        return self._take(batch, start, min(stop, self.local_rows), instead=0)

    def _take(self, batch: Any, start: int, stop: int, *, instead: int) -> Any:
        """Return a range of rows; if it is empty, the row `instead`, which is not counted."""
        self.is_padding = start >= stop
        rows = slice(instead, instead + 1) if self.is_padding else slice(start, stop)
        return self.to_device(tree_map(lambda each: each[rows] if has_rows(each) else each, batch))

    def to_device(self, batch: Any) -> Any:
        return tree_map(
            lambda each: each.to(self.device, non_blocking=True) if isinstance(each, Tensor) else each, batch
        )

    def check_same(self, batch: Any, *, num_rows: int, where: str) -> None:
        """Compare what all ranks should hold alike; see `BatchAgreement`."""
        self._agreement.check(batch, num_rows=num_rows, step=self.num_steps, where=where)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the rows of the training step as they are, while other rows are evaluated."""
        kept = {name: getattr(self, name) for name in ROW_STATE}
        self.is_evaluating = True
        try:
            yield
        finally:
            vars(self).update(kept)


def has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def part_of(num_rows: int, rank: int, world_size: int) -> range:
    """Return the rows of a rank: consecutive, and at most one more than those of another rank."""
    each, more = divmod(num_rows, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def num_rows_of(batch: Any, where: str) -> int:
    """Return the number of rows of a batch. Raise UserError if its tensors differ in it, or have none."""
    lengths = {len(leaf) for leaf in tree_leaves(as_tree(batch)) if has_rows(leaf)}
    if len(lengths) == 1 and (num_rows := lengths.pop()):
        return num_rows
    what = f"tensors of {', '.join(map(str, sorted(lengths)))} rows" if lengths - {0} else "no rows"
    raise UserError("P040", f"this global batch has {what}", where=where,
                    fix="pass a tensor, or a tuple, list or dict of tensors, with the rows of the global batch as "
                    "their first dimension")  # fmt: skip

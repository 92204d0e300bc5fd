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
             "max_local_rows", "batch_dim", "num_rows_here", "row_shapes")  # fmt: skip


class LoopContext:
    """The state that several loops (a generator's and a discriminator's) have in common.

    `is_padding`: this rank has no rows of the current batch. It works on a copy of one, which counts nothing, since the
    other ranks need it in their collectives. `any_padding`: some rank has none. `is_synced`: gradients are reduced in
    the current backward. `num_dealt` counts the batches and micro-batches that were dealt. `num_rows_here` rows are in
    the rank's latest one, along `batch_dim` of its tensors, whose shapes are `row_shapes`; 0 if that is not known.
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
        self.loader_dim = 0  # the dimension of its rows
        self.local_rows = self.min_local_rows = self.max_local_rows = 0
        self.batch_dim = self.num_rows_here = 0
        self.row_shapes: list[tuple[int, ...]] = []

    def set_sync(self, is_last: bool) -> None:
        """Say whether the next backward is the last one before a step."""
        self.is_synced = is_last
        self.num_dealt += 1
        for set_sync in self.set_syncs:
            set_sync(is_last)

    def set_counted(self, is_counted: bool) -> None:
        self.is_padding = not is_counted

    def rows_of(self, batch: Any, start: int, stop: int, *, dim: int = 0) -> Any:
        """Return this rank's part of the rows from `start` to `stop` of a global batch, on the device."""
        part = part_of(stop - start, self.rank, self.world_size)
        self.any_padding = stop - start < self.world_size
        return self._take(batch, start + part.start, start + part.stop, instead=start, dim=dim)

    def local_rows_of(self, batch: Any, start: int, stop: int, *, dim: int = 0) -> Any:
        """Return the rows from `start` to `stop` of a batch that holds only this rank's rows."""
        self.any_padding = start >= self.min_local_rows
        return self._take(batch, start, min(stop, self.local_rows), instead=0, dim=dim)

    def _take(self, batch: Any, start: int, stop: int, *, instead: int, dim: int) -> Any:
        """Return a range of rows; if it is empty, the row `instead`, which is not counted."""
        self.is_padding = start >= stop
        rows = slice(instead, instead + 1) if self.is_padding else slice(start, stop)
        taken = self.to_device(cut_rows(batch, rows, dim))
        self.note_rows(taken, dim)
        return taken

    def note_rows(self, batch: Any, dim: int) -> None:
        """Note the rows that this rank works on from now on."""
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(as_tree(batch)) if has_rows(leaf)]
        sizes = {shape[min(dim, len(shape) - 1)] for shape in shapes}
        self.batch_dim, self.row_shapes = dim, shapes
        self.num_rows_here = sizes.pop() if len(sizes) == 1 else 0

    def to_device(self, batch: Any) -> Any:
        return tree_map(
            lambda each: each.to(self.device, non_blocking=True) if isinstance(each, Tensor) else each, batch
        )

    def check_same(self, batch: Any, *, num_rows: int, where: str) -> None:
        """Compare what all ranks should hold alike; see `BatchAgreement`."""
        if self.world_size > 1:
            _refuse_graph(batch, num_rows, where)
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


def is_list(leaf: Any) -> bool:
    """Return whether this is a list of text, or of numbers: plain values, perhaps one for each row."""
    kinds = {type(each) for each in leaf} if type(leaf) in (list, tuple) else set()
    return bool(kinds) and (kinds <= {str, bytes} or (isinstance(leaf, list) and kinds <= {int, float, bool}))


def cut_rows(batch: Any, rows: slice, dim: int = 0) -> Any:
    """Return a range of the rows of a batch, along dimension `dim`. A tensor with fewer dimensions has them last."""
    num_rows = _num_rows(batch, dim)

    def cut(leaf: Any) -> Any:
        if has_rows(leaf):
            return leaf[(slice(None),) * min(dim, leaf.ndim - 1) + (rows,)]
        return leaf[rows] if is_list(leaf) and len(leaf) == num_rows else leaf

    return tree_map(cut, batch, is_leaf=is_list)


def _num_rows(batch: Any, dim: int) -> int | None:
    """Return the number of rows of the tensors of a batch, or else of its texts; None if they differ or have none."""
    leaves = tree_leaves(batch, is_leaf=is_list)
    sizes = {leaf.shape[min(dim, leaf.ndim - 1)] for leaf in leaves if has_rows(leaf)}
    sizes = sizes or {len(leaf) for leaf in leaves if is_list(leaf) and isinstance(leaf[0], str | bytes)}
    return sizes.pop() if len(sizes) == 1 else None


def part_of(num_rows: int, rank: int, world_size: int) -> range:
    """Return the rows of a rank: consecutive, and at most one more than those of another rank."""
    each, more = divmod(num_rows, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def num_rows_of(batch: Any, where: str, *, dim: int = 0) -> int:
    """Return the number of rows of a batch. Raise UserError if its tensors or texts differ in it, or have none."""
    tree = as_tree(batch)
    num_rows = _num_rows(tree, dim)
    leaves = tree_leaves(tree, is_leaf=is_list)
    shapes = [tuple(leaf.shape) for leaf in leaves if has_rows(leaf)]
    texts = {len(leaf) for leaf in leaves if is_list(leaf) and isinstance(leaf[0], str | bytes)}
    if num_rows and texts <= {num_rows}:
        return num_rows
    sizes = sorted({shape[min(dim, len(shape) - 1)] for shape in shapes})
    if num_rows:
        what = f"lists of {', '.join(map(str, sorted(texts)))} texts beside tensors of {num_rows} rows"
        fix = "pass one text for each row; keep lists of anything else, such as names of classes, out of the batch"
    elif set(sizes) - {0}:
        what = f"tensors of {', '.join(map(str, sizes))} rows"
        fix = ("pass a tensor, or a tuple, list or dict of tensors, with the rows of the global batch as their first "
               "dimension")  # fmt: skip
        if other := _common_dim(shapes):
            fix = f"if the rows are dimension {other} of shapes {_listed(shapes)}, pass batch_dim={other}; else {fix}"
    else:
        what, fix = "no rows", "pass at least one row, as the first dimension of tensors"
    raise UserError("P040", f"this global batch has {what}", where=where, fix=fix)


def _refuse_graph(batch: Any, num_rows: int, where: str) -> None:
    """Raise UserError for the adjacency matrix of one graph: its nodes are no rows that ranks could share."""
    for leaf in tree_leaves(as_tree(batch)):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided and leaf.shape == (num_rows, num_rows):
            raise UserError("P040", f"this global batch has a sparse matrix of {num_rows} x {num_rows}, as of a graph, "
                            f"and {num_rows} nodes: ranks cannot compute their rows alone", where=where,
                            fix="train one graph on one process, or batches of subgraphs, each with its own matrix, "
                            "through loop.uneven_batches")  # fmt: skip


def _common_dim(shapes: list[tuple[int, ...]]) -> int | None:
    """Return the first dimension but 0 in which all of the tensors have the same size."""
    fewest = min((len(shape) for shape in shapes if len(shape) > 1), default=0)
    for dim in range(1, fewest):
        if len({shape[min(dim, len(shape) - 1)] for shape in shapes}) == 1:
            return dim
    return None


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:4])

"""What the loops of one training share: the ranks, this rank's rows, the order of calls, and the numbers of a step."""

import atexit
import json
import logging
import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_leaves, tree_map

from trimaran.core import DEVICE_TRAITS, UserError
from trimaran.parallel import all_gather_int64
from trimaran.train import TIMEOUT

log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
MAX_POLL_SECONDS = 0.1
WARN_SECONDS = 15.0
ENDED = "has reached the end of its script"
_numbers = count()


class CallOrder:
    """The calls that every rank must make, in one order. Each rank publishes its latest one in the ranks' store.

    `note` publishes a call and returns at once. `meet` also waits until every rank makes the same call. It raises if
    another rank has made a different one in its place: that rank will never arrive. A rank that is merely slow is
    waited for. Single ranks publish nothing.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self._store: Any = None
        if self.world_size > 1:
            self._store = dist.PrefixStore(f"trimaran/loop{next(_numbers)}", _get_default_store())
            atexit.register(self._leave)

    def note(self, call: str) -> None:
        """Publish a call that needs all ranks, without waiting for them."""
        if self._store is not None:
            self._number += 1
            self._store.set(f"last/{self.rank}", json.dumps([self._number, call]))

    def meet(self, call: str, *, fix: str) -> None:
        """Return when every rank has made this call. Raise UserError if one of them has made another instead."""
        if self._store is None:
            return
        self.note(call)
        key, started, pause, warned = f"meet/{self._number}/{call}", time.monotonic(), POLL_SECONDS, False
        if self._store.add(key, 1) == self.world_size:
            self._store.set(f"{key}/all", "")
        while not self._store.check([f"{key}/all"]):
            elapsed = time.monotonic() - started
            for rank, (number, other) in self._latest().items():
                is_other = number > self._number or (number == self._number and other != call)
                # A rank that was here may have gone on in the meantime.
                if is_other and not self._store.check([f"{key}/all"]):
                    instead = other if other == ENDED else f"made {other} in its place"
                    raise self._error(call, f"rank {rank} {instead}", fix)
            if elapsed > WARN_SECONDS and not warned:
                warned = True
                log.warning("rank %d has waited %.0f s in %s for rank(s) %s: does every rank call it?", self.rank,
                            elapsed, call, ", ".join(map(str, self._missing())))  # fmt: skip
            if elapsed > TIMEOUT.total_seconds():
                raise self._error(call, f"rank(s) {', '.join(map(str, self._missing()))} did not", fix)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _error(self, call: str, others: str, fix: str) -> UserError:
        return UserError("P046.ranks-differ", where=call, fix=fix, rank=self.rank, call=call, others=others)

    def _latest(self) -> dict[int, tuple[int, str]]:
        """Return number and name of the latest call of every other rank that has made one."""
        others = [rank for rank in range(self.world_size) if rank != self.rank and self._store.check([f"last/{rank}"])]
        return {rank: tuple(json.loads(self._store.get(f"last/{rank}"))) for rank in others}

    def _missing(self) -> list[int]:
        latest, others = self._latest(), (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if latest.get(rank, (0, ""))[0] < self._number]

    def _leave(self) -> None:
        try:
            self.note(ENDED)
        except (RuntimeError, ValueError) as error:  # the store is gone when another rank has ended first
            log.debug("the end of rank %d was not published: %s", self.rank, error)


FIRST_CHECKS = 5
CHECK_EVERY = 20
MAX_ROWS, MAX_COLUMNS = 64, 256  # of each tensor that are hashed, evenly spaced
CAUSES = (
    "derive the batch from the step alone, or let loop.loader deal the data. Usual causes: a random generator that one "
    "rank draws from more often than the others (an evaluation on the main rank alone: run it on every rank, or with "
    "loop.evaluate), files in another order (sort them), the order of a set (sort it), a seed that depends on the "
    "rank, workers without a seed"
)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest(batch: Any) -> int:
    """Return a 63-bit hash of shapes and values, a few of a large tensor's; leaves of other types are ignored."""
    hashed = blake2b(digest_size=8)
    for leaf in tree_leaves(as_tree(batch)):
        if isinstance(leaf, Tensor):
            hashed.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode() + _values(leaf))
        elif isinstance(leaf, (bool, int, float, str, bytes)):
            hashed.update(repr(leaf).encode())
        elif hasattr(leaf, "__array_interface__"):  # NumPy arrays and PIL images
            array = np.asarray(leaf)
            if array.dtype.kind in "biufc":
                hashed.update(f"{array.shape}{array.dtype}".encode() + _values(torch.from_numpy(np.array(array))))
    return struct.unpack("<q", hashed.digest())[0] >> 1


def as_tree(batch: Any) -> Any:
    """Return the batch as torch's pytree functions know it: mappings of other classes (BatchEncoding) become dicts."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _values(tensor: Tensor) -> bytes:
    """Return some values of a tensor as bytes; it waits for the device."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.ndim else tensor.detach().reshape(1, 1)
    limits = zip(rows.shape, (MAX_ROWS, MAX_COLUMNS), strict=True)
    height, width = (
        torch.arange(size) if size <= most else torch.arange(most) * (size - 1) // (most - 1) for size, most in limits
    )
    chosen = rows[height.to(rows.device)[:, None], width.to(rows.device)]
    return chosen.cpu().view(torch.uint8).numpy().tobytes()


def to_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each, batch)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and each of its modules back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of torch's, NumPy's and Python's global CPU generators afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators: of the CPU, and of the device if that has its own."""
    own = [torch.cuda.get_rng_state(device)] if DEVICE_TRAITS[device.type].has_own_generator else []
    return [torch.get_rng_state(), *own]


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
        self._num_batches = 0
        self._agreed_at = -1  # the last step in which all ranks held the same batch
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
        num_rows = _num_rows(batch, dim)

        def cut(leaf: Any) -> Any:
            if has_rows(leaf):  # a tensor with fewer dimensions has its rows last
                return leaf[(slice(None),) * min(dim, leaf.ndim - 1) + (rows,)]
            return leaf[rows] if is_list(leaf) and len(leaf) == num_rows else leaf

        taken = to_device(tree_map(cut, batch, is_leaf=is_list), self.device)
        self.note_rows(taken, dim)
        return taken

    def note_rows(self, batch: Any, dim: int) -> None:
        """Note the rows that this rank works on from now on."""
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(as_tree(batch)) if has_rows(leaf)]
        sizes = {shape[min(dim, len(shape) - 1)] for shape in shapes}
        self.batch_dim, self.row_shapes = dim, shapes
        self.num_rows_here = sizes.pop() if len(sizes) == 1 else 0

    def check_same(self, batch: Any, *, num_rows: int, where: str) -> None:
        """Raise UserError on all ranks if they hold other batches. Every rank must call it.

        A hash is compared for the first batches, and then for every `CHECK_EVERY`-th.
        """
        for leaf in tree_leaves(as_tree(batch)) if self.world_size > 1 else ():
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided and leaf.shape == (num_rows, num_rows):
                raise UserError("P040.global-batch-sparse", where=where, num_rows=num_rows)
        number = self._num_batches
        self._num_batches += 1
        if self.calls.world_size == 1 or (number >= FIRST_CHECKS and number % CHECK_EVERY):
            return
        self.calls.note(f"{where} of step {self.num_steps}")
        gathered = all_gather_int64(np.array([num_rows, digest(batch)], dtype=np.int64))
        if (gathered == gathered[0]).all():
            self._agreed_at = self.num_steps
            return
        if (gathered[:, 0] != gathered[0, 0]).any():
            found = "; ".join(f"rank {rank} has {rows} rows" for rank, (rows, _) in enumerate(gathered.tolist()))
        else:
            groups: dict[int, list[int]] = {}
            for rank, (_, value) in enumerate(gathered.tolist()):
                groups.setdefault(value, []).append(rank)
            most, *others = sorted(groups.values(), key=len, reverse=True)
            odd = sorted(rank for group in others for rank in group)
            found = f"{_ranks(odd)} {'holds' if len(odd) == 1 else 'hold'} other rows than {_ranks(most)}"
        agreed = f" (they agreed in step {self._agreed_at})" if self._agreed_at >= 0 else ""
        raise UserError("P045.ranks-hold-different", where=where, num_steps=self.num_steps, found=found, agreed=agreed)

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
        fewest = min((len(shape) for shape in shapes if len(shape) > 1), default=0)
        same = (each for each in range(1, fewest) if len({shape[min(each, len(shape) - 1)] for shape in shapes}) == 1)
        if other := next(same, None):
            listed = ", ".join(str(list(shape)) for shape in shapes[:4])
            fix = f"if the rows are dimension {other} of shapes {listed}, pass batch_dim={other}; else {fix}"
    else:
        what, fix = "no rows", "pass at least one row, as the first dimension of tensors"
    raise UserError("P040.global-batch", where=where, fix=fix, text=what)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of one optimizer step, over the global batch. Tensors on the device: reading one waits for it."""

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor

    @property
    def num_samples(self) -> Tensor:
        """The same as `num_tokens`, for losses that are counted by sample."""
        return self.num_tokens

"""Checks that all ranks hold the same global batch: if not, the loop would train on something else in silence."""

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimaran.core import UserError
from trimaran.loop.call_order import CallOrder
from trimaran.parallel.comm.json_exchange import all_gather_int64

FIRST_CHECKS = 5
CHECK_EVERY = 20
MAX_ROWS, MAX_COLUMNS = 64, 256  # of each tensor that are hashed, evenly spaced
CAUSES = (
    "derive the batch from the step alone, or let loop.loader deal the data. Usual causes: a random generator that one "
    "rank draws from more often than the others (an evaluation on the main rank alone: run it on every rank, or with "
    "loop.evaluate), files in another order (sort them), the order of a set (sort it), a seed that depends on the "
    "rank, workers without a seed"
)


class BatchAgreement:
    """Compares a hash of the global batch between ranks, for the first batches and then for every `CHECK_EVERY`-th."""

    def __init__(self, calls: CallOrder) -> None:
        self._calls, self._num_batches, self._agreed_at = calls, 0, -1

    def check(self, batch: Any, *, num_rows: int, step: int, where: str) -> None:
        """Raise UserError on all ranks if some of them hold another batch. Every rank must call it."""
        number = self._num_batches
        self._num_batches += 1
        if dist.get_world_size() == 1 or (number >= FIRST_CHECKS and number % CHECK_EVERY):
            return
        self._calls.note(f"{where} of step {step}")
        gathered = all_gather_int64(np.array([num_rows, digest(batch)], dtype=np.int64))
        if (gathered != gathered[0]).any():
            raise UserError("P045", f"ranks hold different global batches in step {step}: {_difference(gathered)}"
                            + (f" (they agreed in step {self._agreed_at})" if self._agreed_at >= 0 else ""),
                            where=where, fix=CAUSES)  # fmt: skip
        self._agreed_at = step


def _difference(gathered: np.ndarray) -> str:
    """Return which ranks differ from most of the others, or how many rows each has."""
    if len({int(rows) for rows, _ in gathered}) > 1:
        return "; ".join(f"rank {rank} has {rows} rows" for rank, (rows, _) in enumerate(gathered.tolist()))
    groups: dict[int, list[int]] = {}
    for rank, (_, value) in enumerate(gathered.tolist()):
        groups.setdefault(value, []).append(rank)
    most, *others = sorted(groups.values(), key=len, reverse=True)
    odd = sorted(rank for group in others for rank in group)
    return f"{_ranks(odd)} {'holds' if len(odd) == 1 else 'hold'} other rows than {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest(batch: Any) -> int:
    """Return a 63-bit hash of shapes and values. Of a large tensor it reads a few evenly spaced values.

    Leaves that are neither tensors, arrays, numbers nor text are ignored.
    """
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
    height, width = (_spread(size, most) for size, most in zip(rows.shape, (MAX_ROWS, MAX_COLUMNS), strict=True))
    chosen = rows[height.to(rows.device)[:, None], width.to(rows.device)]
    return chosen.cpu().view(torch.uint8).numpy().tobytes()


def _spread(size: int, most: int) -> Tensor:
    """Return up to `most` numbers below `size`, evenly spaced."""
    return torch.arange(size) if size <= most else torch.arange(most) * (size - 1) // (most - 1)

"""The rank's part of each step, the order of samples, and the interface of a batch feed.

Runs in loader processes: does not import torch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from trimaran.core import Plan

ROUNDS = 4
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """The rank's part of each global batch. `rank` counts among the `dp` ranks that see different samples.

    `rows` are those of a micro-batch of each rank, if ranks differ; this rank has `micro_batch` of them.
    """

    rank: int
    dp: int
    micro_batch: int
    grad_accum: int
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.rows or (len(self.rows) == self.dp and self.rows[self.rank] == self.micro_batch)

    @property
    def first_step(self) -> int:
        """The first step whose rows are known."""
        return 0

    @property
    def rows_by_rank(self) -> tuple[int, ...]:
        """The rows of a micro-batch of each rank."""
        return self.rows or (self.micro_batch,) * self.dp

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch of all ranks together."""
        return sum(self.rows) if self.rows else self.dp * self.micro_batch

    @property
    def global_batch(self) -> int:
        """Rows per step over all ranks."""
        return self.rows_at_once * self.grad_accum

    def of(self, rank: int) -> "DataShare":
        """Return the part of another rank."""
        return replace(self, rank=rank, micro_batch=self.rows[rank] if self.rows else self.micro_batch)

    def indices(self, step: int) -> np.ndarray:
        """Return the global indices of the rank's rows in a step, [grad_accum, micro_batch]."""
        first = sum(self.rows[: self.rank]) if self.rows else self.rank * self.micro_batch
        micro_steps = np.arange(self.grad_accum)[:, None] * self.rows_at_once
        return step * self.global_batch + micro_steps + first + np.arange(self.micro_batch)

    def rows_of(self, steps: range, data_ranks: Sequence[int]) -> np.ndarray:
        """Return the global indices of the rows of these ranks in each of the steps, [steps, rows]."""
        rows = np.concatenate([self.of(rank).indices(0).ravel() for rank in data_ranks])
        return np.array(steps)[:, None] * self.global_batch + rows


def share_of(plan: Plan, rank: int) -> DataShare:
    """Return the part of a data rank under a plan. Rows that are yet to be measured are dealt equally."""
    rows = plan.rows_by_rank
    micro_batch = rows[rank] if rows else plan.micro_batch
    return DataShare(rank=rank, dp=plan.mesh.dp, micro_batch=micro_batch, grad_accum=plan.grad_accum, rows=rows)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be used, and why. Its row is kept, without targets."""

    sample: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedArrays:
    """The arrays of one optimizer step for one rank.

    A regular array has the micro-batches as its first dimension. A ragged array is the concatenation of all
    micro-batches; `offsets` then says where each one starts and where the last one ends. `num_valid` counts the
    targets that the loss is summed over. `metrics` are sums over this rank's rows, which are summed over ranks.
    """

    arrays: Mapping[str, np.ndarray]
    num_valid: int
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()


class BatchFeed(Protocol):
    """A source of batches. A batch depends only on the step and on the quarantined samples."""

    @property
    def share(self) -> DataShare: ...

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        """Return the arrays of a step. Calls `at` with each sample id before reading it, to attribute crashes."""
        ...

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the sample ids that the given data ranks process at `step`."""
        ...

    def num_quarantined(self, step: int) -> int:
        """Return how many samples of the global batch are quarantined at `step`."""
        ...


class QuarantiningFeed(ABC):
    """The part that all feeds share; see `BatchFeed`."""

    share: DataShare
    quarantined: frozenset[int]
    num_rows: int  # of an epoch

    @abstractmethod
    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]: ...

    def rows_in(self, epochs: float) -> int:
        return max(1, round(epochs * self.num_rows))

    def steps_in(self, epochs: float) -> int:
        """Return the number of steps in so many epochs; the last step may have blank rows."""
        return -(-self.rows_in(epochs) // self.share.global_batch)

    def num_quarantined(self, step: int) -> int:
        return len(self.quarantined.intersection(self.samples(step, range(self.share.dp)))) if self.quarantined else 0


def num_held_out(count: int, fraction: float) -> int:
    """Return how many of `count` samples are held out: at least one, and never all."""
    return min(max(1, round(count * fraction)), count - 1) if fraction > 0 else 0


def position(seed: int, index: int, length: int) -> int:
    """Return the sample at global `index` when `length` samples are reshuffled each epoch."""
    return int(positions(seed, np.array([index]), length)[0])


def positions(seed: int, indices: np.ndarray, length: int) -> np.ndarray:
    """Return `position` of every index. Each epoch is a permutation of range(length), computed without a table.

    A Feistel network permutes the cells of the smallest near-square grid with at least `length` cells. An index that
    lands outside is permuted again until it is inside (cycle walking), which keeps the map a bijection.
    """
    assert length > 0
    epochs, places = np.divmod(indices.astype(np.uint64), np.uint64(length))
    keys = _mix(_mix(np.full_like(epochs, seed) + GOLDEN) + epochs)
    height = math.isqrt(length - 1) + 1
    width = -(-length // height)
    places = _feistel(places, keys, height, width)
    while (out_of_bounds := places >= length).any():
        places[out_of_bounds] = _feistel(places[out_of_bounds], keys[out_of_bounds], height, width)
    return places.astype(np.int64)


def _feistel(cells: np.ndarray, keys: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the cells after ROUNDS rounds. A round shifts each column by a hash of its number, then each row."""
    rows, columns = np.divmod(cells, np.uint64(width))
    for _ in range(ROUNDS):
        keys = keys + GOLDEN
        rows = (rows + _mix(columns ^ keys) % np.uint64(height)) % np.uint64(height)
        keys = keys + GOLDEN
        columns = (columns + _mix(rows ^ keys) % np.uint64(width)) % np.uint64(width)
    return rows * np.uint64(width) + columns


def _mix(values: np.ndarray) -> np.ndarray:
    """Return splitmix64's finalizer of each value: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

"""The rank's part of each step, and the interface of a batch feed. Runs in loader processes: does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from trimaran.core import Plan


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

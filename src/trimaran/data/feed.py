"""What a rank works on in a step, and where a loader gets it from. Runs in loader processes: without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """Which part of each global batch is this rank's. `rank` counts among the `dp` ranks that see different samples."""

    rank: int
    dp: int
    micro_batch: int
    grad_accum: int

    @property
    def global_batch(self) -> int:
        """Rows of a step, of all ranks together."""
        return self.dp * self.micro_batch * self.grad_accum

    def indices(self, step: int) -> np.ndarray:
        """Return the global indices of the step's rows [grad_accum, micro_batch]."""
        rows = np.arange(self.micro_batch) + self.rank * self.micro_batch
        micro_steps = np.arange(self.grad_accum)[:, None] * (self.dp * self.micro_batch)
        return step * self.global_batch + micro_steps + rows


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be used, and why. Its place was kept, without a target."""

    sample: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedArrays:
    """One optimizer step's work for one rank.

    An array either has the micro-batches as its first dimension, or, when it is ragged, all of them one behind the
    other: then `cuts` tells where each begins, and where the last ends. `num_valid` counts the targets: what the loss
    is summed over. `facts` are worth a place in the metrics: sums over this rank's rows, which are added up over ranks.
    """

    arrays: Mapping[str, np.ndarray]
    num_valid: int
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    bad: tuple[BadSample, ...] = ()


class BatchFeed(Protocol):
    """Where batches come from. What it loads is a function of the step alone, and of what is left out."""

    @property
    def share(self) -> DataShare: ...

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        """Return the step's work. `at` is told the id of each sample before it is touched, to know what one died of."""
        ...

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the samples that the given ranks, of those that see different ones, work on at `step`."""
        ...

    def num_quarantined(self, step: int) -> int:
        """Return how many samples of the global batch are left out at `step`."""
        ...

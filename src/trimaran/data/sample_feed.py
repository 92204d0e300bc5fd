"""Batches of samples of different lengths, with or without images: packed rows, assigned to ranks by cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import DataSection, ImageRules, RowCost, UserError
from trimaran.data.feed import BadSample, DataShare, LoadedArrays, positions
from trimaran.data.image_arrays import FeatureSource, ImageArrays
from trimaran.data.quarantine import READ_ATTEMPTS, RETRY_PAUSE_SECONDS, BadSampleError
from trimaran.data.row_arrays import RowArrays, row_spans
from trimaran.data.row_balance import NO_ROW, balance_rows, rank_costs, sequential_rows, slowest_rank_cost
from trimaran.data.row_packing import PackingRules, RowPacking, open_row_packing
from trimaran.data.sample_costs import SampleSizes, SampleTable, measure_samples
from trimaran.data.text.packed_sample import PackedSample, SamplePacker
from trimaran.data.text.token_shards import IGNORED

MAX_CACHED_STEPS = 8  # row assignments kept: the loader asks again when it names the samples of a step
MAX_REASON_CHARACTERS = 300


class PreparedIndex(SampleTable, Protocol):
    """A sample index on disk with mixture weights; `samples.sample_index.SampleIndex` implements it."""

    @property
    def path(self) -> Path: ...

    def mixed(self, seed: int, keep: np.ndarray | None = None) -> np.ndarray: ...

    def holdout_mask(self, fraction: float, seed: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFeedOptions:
    """What the model needs of its samples: image rules (None: no images), row costs and the seed of the run.

    With `features`, batches carry those instead of patches. Token ids must be below `vocabulary`; None skips that
    check.
    """

    rules: ImageRules | None
    cost: RowCost
    seed: int = 0
    vocabulary: int | None = None
    features: FeatureSource | None = None


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """A step's global batch: the sample ids of each row, the cost of each row, and which rank gets which row.

    `assignment` has row numbers [grad_accum, dp, micro_batch], and NO_ROW where a rank has fewer.
    """

    rows: tuple[np.ndarray, ...]
    costs: np.ndarray
    assignment: np.ndarray

    def rows_of(self, rank: int) -> list[np.ndarray]:
        """Return the rows of a rank, micro-batch by micro-batch."""
        return [self.rows[row] for row in self.assignment[:, rank].ravel() if row != NO_ROW]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Samples packed into rows, and the size of each sample."""

    table: SampleTable
    packing: RowPacking
    sample_sizes: SampleSizes


def sample_feeds(
    section: DataSection,
    index: PreparedIndex,
    options: SampleFeedOptions,
    *,
    share: DataShare,
    quarantined: frozenset[int] = frozenset(),
) -> tuple["SampleFeed", "SampleFeed | None"]:
    """Return the training feed and the holdout feed, if any. Samples are held out before sources are mixed."""
    if options.rules is None and len(index.image_sizes):
        raise UserError("T051", f"the data has {len(index.image_sizes):,} images, and this model takes no images",
                        where="model.family", fix="use a model of family vlm, or data without images")  # fmt: skip
    sample_sizes = measure_samples(index, options.rules)
    rules = PackingRules(
        seq_len=section.seq_len, batching=section.samples.batching, seed=options.seed, images=options.rules
    )

    def rows_of(ids: np.ndarray) -> SampleRows:
        packing = open_row_packing(index, ids, sample_sizes, rules, folder=index.path.parent / "charts")
        return SampleRows(index, packing, sample_sizes)

    held_out = index.holdout_mask(section.holdout, options.seed)
    training, holdout = rows_of(index.mixed(options.seed, ~held_out)), rows_of(np.flatnonzero(held_out))
    if not len(training.packing):
        raise _no_samples_left(training.packing)
    balance = section.samples.balance
    return (
        SampleFeed(training, options, share=share, balance=balance, epochs=section.epochs, quarantined=quarantined),
        SampleFeed(holdout, options, share=share, balance=balance) if len(holdout.packing) else None,
    )


class SampleFeed:
    """A `feed.BatchFeed` of samples. A sample's id is its number in the index.

    With `epochs`, rows after the last epoch are empty on all ranks alike; without, the feed has no end.
    """

    def __init__(
        self,
        rows: SampleRows,
        options: SampleFeedOptions,
        *,
        share: DataShare,
        balance: bool = True,
        epochs: float = 0,
        quarantined: frozenset[int] = frozenset(),
    ) -> None:
        assert len(rows.packing) > 0
        self.share, self._options, self._quarantined, self._balance = share, options, quarantined, balance
        self._table, self._packing, self._sample_sizes = rows.table, rows.packing, rows.sample_sizes
        self._packer = SamplePacker(options.rules, self._packing.seq_len, options.vocabulary)
        self._extra_cost = self._sample_sizes.extra_cost(options.cost, self._packing.seq_len)
        self._end = self._rows_in(epochs) if epochs else None
        self._assignments: dict[int, RowAssignment] = {}

    @property
    def packing(self) -> RowPacking:
        return self._packing

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""
        return len(self._packing)

    def steps_in(self, epochs: float) -> int:
        """Return the number of steps in so many epochs; the last step may have empty rows."""
        return -(-self._rows_in(epochs) // self.share.global_batch)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        batch = self._assign(step)
        rows = [row for rank in data_ranks for row in batch.rows_of(rank)]
        return tuple(np.concatenate(rows).tolist()) if rows else ()

    def num_quarantined(self, step: int) -> int:
        quarantined = self._quarantined
        return len(quarantined.intersection(self.samples(step, range(self.share.dp)))) if quarantined else 0

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        batch = self._assign(step)
        rows = batch.rows_of(self.share.rank)
        arrays = RowArrays(
            self.share, self._packing.seq_len, sources=len(self._table.source_names) > 1, rules=self._options.rules
        )
        images = self._image_arrays(rows)
        bad: list[BadSample] = []
        for number, row in enumerate(rows):
            if images is not None and number % self.share.micro_batch == 0:
                images.begin_micro_batch()
            samples = []
            for sample_id in row.tolist():
                at(sample_id)
                samples.append(self._fetch(sample_id, images, bad))
            spans = row_spans(self._lengths(row), self._packing.seq_len, self._packing.batching)
            arrays.write_row(number, spans, samples, self._table.sources[row].tolist())
        return LoadedArrays(
            arrays=arrays.arrays() | ({} if images is None else images.arrays()),
            num_valid=int(np.count_nonzero(arrays.labels != IGNORED)),
            offsets={} if images is None else images.offsets(),
            metrics=self._metrics(batch, rows) | {"bad": len(bad)},
            bad=tuple(bad),
        )

    def _fetch(self, sample_id: int, images: ImageArrays | None, bad: list[BadSample]) -> PackedSample:
        """Return a packed sample and append its images; a blank sample if it is quarantined or bad."""
        numbers = range(*self._table.first_image[sample_id : sample_id + 2].tolist())
        sizes = np.asarray(self._table.image_sizes[numbers.start : numbers.stop])
        if sample_id not in self._quarantined:
            try:
                return self._read(sample_id, numbers, sizes, images)
            except Exception as error:
                reason = f"{self._table.origin(sample_id)}: {error}"
                bad.append(BadSample(sample_id, reason[:MAX_REASON_CHARACTERS]))
        blank = self._packer.blank(int(self._sample_sizes.lengths[sample_id]), sizes)
        if images is not None:
            images.append_blank(blank.grids, blank.layouts)
        return blank

    def _read(self, sample_id: int, numbers: range, sizes: np.ndarray, images: ImageArrays | None) -> PackedSample:
        """Return a packed sample. Failed reads are retried: a network file system may recover within a moment."""
        for attempts_left in reversed(range(READ_ATTEMPTS)):
            try:
                times = self._table.image_times[numbers.start : numbers.stop].tolist()
                packed = self._packer.pack(self._table.sample(sample_id), sizes, times)
                if len(packed) != min(self._sample_sizes.lengths[sample_id], self._packing.seq_len):
                    raise BadSampleError(f"it has {len(packed)} tokens, but its index says otherwise")
                if images is not None:
                    images.append(numbers, packed.grids, packed.layouts)
                return packed
            except Exception:
                if not attempts_left:
                    raise
                time.sleep(RETRY_PAUSE_SECONDS)
        raise AssertionError("there is at least one attempt")

    def _image_arrays(self, rows: Sequence[np.ndarray]) -> ImageArrays | None:
        """Return empty arrays for the images of these rows; None if the model takes no images."""
        if self._options.rules is None:
            return None
        patches = int(sum(self._sample_sizes.patches[row].sum() for row in rows))
        size = patches if self._options.features is None else patches // self._options.rules.merge**2
        return ImageArrays(self._table, self._options.rules, size, self._options.features)

    def _metrics(self, batch: RowAssignment, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the metrics of this rank's rows: samples, tokens, padding, patches and cost.

        `slowest` over `cost`, both summed over ranks, is how much longer the slowest rank takes than the mean.
        """
        tokens = int(sum(self._lengths(row).sum() for row in rows))
        patches = (
            {}
            if self._options.rules is None
            else {"patches": sum(int(self._sample_sizes.patches[row].sum()) for row in rows)}
        )
        return {
            "samples": sum(map(len, rows)),
            "tokens": tokens,
            "padding": len(rows) * self._packing.seq_len - tokens,
            **patches,
            "cost": float(rank_costs(batch.costs, batch.assignment)[:, self.share.rank].sum()),
            "slowest": slowest_rank_cost(batch.costs, batch.assignment),
        }

    def _assign(self, step: int) -> RowAssignment:
        """Return the row assignment of a step. All ranks compute the same one."""
        if (cached := self._assignments.get(step)) is not None:
            return cached
        indices = np.arange(step * self.share.global_batch, (step + 1) * self.share.global_batch)
        real = indices if self._end is None else indices[indices < self._end]
        row_numbers = positions(self._options.seed, real, self.num_rows)
        rows = [self._packing.row(row) for row in row_numbers.tolist()]
        rows += [self._packing.samples[:0]] * (len(indices) - len(real))
        costs = self._packing.seq_len + np.array([self._extra_cost[row].sum() for row in rows])
        assignment = balance_rows(costs, self.share) if self._balance else sequential_rows(self.share)
        batch = RowAssignment(tuple(rows), costs, assignment)
        self._assignments = dict([*self._assignments.items(), (step, batch)][-MAX_CACHED_STEPS:])
        return batch

    def _lengths(self, row: np.ndarray) -> np.ndarray:
        return np.minimum(self._sample_sizes.lengths[row], self._packing.seq_len)

    def _rows_in(self, epochs: float) -> int:
        return max(1, round(epochs * self.num_rows))


def _no_samples_left(packing: RowPacking) -> UserError:
    reasons = ", ".join(f"{count:,} times {reason}" for reason, count in packing.left_out.items() if count)
    return UserError("T050", f"no sample is left to train on: {reasons or 'the index has none'}",
                     where="data.seq_len",
                     fix="use a longer seq_len, fewer pixels (data.samples.max_pixels), or other data")  # fmt: skip

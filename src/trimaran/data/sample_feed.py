"""Batches of samples of different lengths, with or without images: packed rows, assigned to ranks by cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trimaran.core import DataSection, ImageRules, RowCost, UserError
from trimaran.data.feed import BadSample, DataShare, LoadedArrays, QuarantiningFeed, positions
from trimaran.data.quarantine import BadSampleError, retried
from trimaran.data.row_arrays import FeatureSource, ImageArrays, PackedSample, RowArrays, SamplePacker
from trimaran.data.row_packing import PackingRules, RowPacking, open_row_packing
from trimaran.data.sample_costs import SampleSizes, SampleTable, measure_samples
from trimaran.data.text.token_shards import IGNORED

if TYPE_CHECKING:
    from trimaran.data.samples.sample_index import SampleIndex

NO_ROW = -1  # in a slot that a rank does not have
MAX_CACHED_STEPS = 8  # row assignments kept: the loader asks again when it names the samples of a step
MAX_REASON_CHARACTERS = 300


def balance_rows(costs: np.ndarray, share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] of the batch; NO_ROW where a rank has fewer slots.

    A micro-step takes rows of similar cost, because FSDP ranks wait for the slowest rank in each micro-step. The most
    expensive rows come first, so a batch that does not fit in memory fails at once. Within a micro-step, the most
    expensive row left goes to the rank with the lowest cost so far; the most expensive bundle goes to the rank with the
    lowest total over the previous micro-steps. Ranks with more slots are faster, in proportion: the most expensive row
    left goes to the rank that would be the first to finish it.
    """
    order = np.argsort(-costs, kind="stable")
    if share.rows:
        slots = np.array(share.rows)
        assignment = np.full((share.grad_accum, share.dp, int(slots.max())), NO_ROW, dtype=np.int64)
        for micro_step, rows in enumerate(order.reshape(share.grad_accum, share.rows_at_once)):
            sums, used = np.zeros(share.dp), np.zeros(share.dp, dtype=np.int64)
            for row in rows.tolist():
                rank = int(np.argmin(np.where(used < slots, (sums + costs[row]) / slots, np.inf)))
                assignment[micro_step, rank, used[rank]] = row
                sums[rank] += costs[row]
                used[rank] += 1
        return assignment
    assignment = np.empty((share.grad_accum, share.dp, share.micro_batch), dtype=np.int64)
    totals = np.zeros(share.dp)
    for micro_step, layers in enumerate(order.reshape(share.grad_accum, share.micro_batch, share.dp)):
        sums = np.zeros(share.dp)
        bundles = np.empty((share.dp, share.micro_batch), dtype=np.int64)
        for number, layer in enumerate(layers):
            cheapest = np.argsort(sums, kind="stable")
            bundles[cheapest, number] = layer
            sums[cheapest] += costs[layer]
        ranks, most_expensive = np.argsort(totals, kind="stable"), np.argsort(-sums, kind="stable")
        assignment[micro_step, ranks] = bundles[most_expensive]
        totals[ranks] += sums[most_expensive]
    return assignment


def sequential_rows(share: DataShare) -> np.ndarray:
    """Return the row of each slot [grad_accum, dp, micro_batch] without balancing; see `balance_rows`."""
    if not share.rows:
        return np.arange(share.global_batch).reshape(share.grad_accum, share.dp, share.micro_batch)
    assignment = np.full((share.grad_accum, share.dp, max(share.rows)), NO_ROW, dtype=np.int64)
    for rank, num in enumerate(share.rows):
        assignment[:, rank, :num] = share.of(rank).indices(0)
    return assignment


def rank_costs(costs: np.ndarray, assignment: np.ndarray) -> np.ndarray:
    """Return the cost of each rank in each micro-step, [grad_accum, dp]."""
    return np.append(costs, 0.0)[assignment].sum(-1)  # NO_ROW is the last, which costs nothing


def slowest_rank_cost(costs: np.ndarray, assignment: np.ndarray) -> float:
    """Return the cost of the critical path: per micro-step the slowest rank's, relative to its number of slots."""
    num_slots = (assignment[0] != NO_ROW).sum(-1)
    return float((rank_costs(costs, assignment) * num_slots.mean() / num_slots).max(-1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFeedOptions:
    """What the model needs of samples. No `rules`: no images; `features` replace patches; `vocabulary` None: any id."""

    rules: ImageRules | None
    cost: RowCost
    seed: int = 0
    vocabulary: int | None = None
    features: FeatureSource | None = None


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """A global batch: ids and cost of each row, and the row or NO_ROW of each slot [grad_accum, dp, micro_batch]."""

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
    index: "SampleIndex",
    options: SampleFeedOptions,
    *,
    share: DataShare,
    quarantined: frozenset[int] = frozenset(),
) -> tuple["SampleFeed", "SampleFeed | None"]:
    """Return the training feed and the holdout feed, if any. Samples are held out before sources are mixed."""
    if options.rules is None and len(index.image_sizes):
        raise UserError("T051.data-images-model", where="model.family", num_image_sizes=len(index.image_sizes))
    sample_sizes = measure_samples(index, options.rules)
    batching = section.samples.batching
    rules = PackingRules(seq_len=section.seq_len, batching=batching, seed=options.seed, images=options.rules)

    def rows_of(ids: np.ndarray) -> SampleRows:
        packing = open_row_packing(index, ids, sample_sizes, rules, folder=index.path.parent / "charts")
        return SampleRows(index, packing, sample_sizes)

    held_out = index.holdout_mask(section.holdout, options.seed)
    training, holdout = rows_of(index.mixed(options.seed, ~held_out)), rows_of(np.flatnonzero(held_out))
    if not len(training.packing):
        left_out = training.packing.left_out.items()
        reasons = ", ".join(f"{count:,} times {reason}" for reason, count in left_out if count)
        raise UserError("T050.no-sample-left", where="data.seq_len", reasons=reasons or "the index has none")
    balance = section.samples.balance
    return (
        SampleFeed(training, options, share=share, balance=balance, epochs=section.epochs, quarantined=quarantined),
        SampleFeed(holdout, options, share=share, balance=balance) if len(holdout.packing) else None,
    )


class SampleFeed(QuarantiningFeed):
    """A `feed.BatchFeed` of samples by number in the index. Rows after `epochs` are empty on all ranks; 0: no end."""

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
        self.share, self._options, self.quarantined, self._balance = share, options, quarantined, balance
        self._table, self.packing, self._sample_sizes = rows.table, rows.packing, rows.sample_sizes
        self._packer = SamplePacker(options.rules, self.packing.seq_len, options.vocabulary)
        self._extra_cost = self._sample_sizes.extra_cost(options.cost, self.packing.seq_len)
        self.num_rows = len(self.packing)
        self._end = self.rows_in(epochs) if epochs else None
        self._assignments: dict[int, RowAssignment] = {}

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        batch = self._assign(step)
        rows = [row for rank in data_ranks for row in batch.rows_of(rank)]
        return tuple(np.concatenate(rows).tolist()) if rows else ()

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        batch = self._assign(step)
        rows = batch.rows_of(self.share.rank)
        has_sources = len(self._table.source_names) > 1
        rules, features, images = self._options.rules, self._options.features, None
        arrays = RowArrays(self.share, self.packing.seq_len, self.packing.batching, sources=has_sources, rules=rules)
        num_patches = int(sum(self._sample_sizes.patches[row].sum() for row in rows))
        if rules is not None:
            size = num_patches if features is None else num_patches // rules.merge**2
            images = ImageArrays(self._table, rules, size, features)
        bad: list[BadSample] = []
        for number, row in enumerate(rows):
            if images is not None and number % self.share.micro_batch == 0:
                images.begin_micro_batch()
            samples = []
            for sample_id in row.tolist():
                at(sample_id)
                samples.append(self._fetch(sample_id, images, bad))
            arrays.write_row(number, self._lengths(row), samples, self._table.sources[row].tolist())
        tokens = int(sum(self._lengths(row).sum() for row in rows))
        metrics: dict[str, float] = {"samples": sum(map(len, rows)), "tokens": tokens}
        metrics["padding"] = len(rows) * self.packing.seq_len - tokens
        if rules is not None:
            metrics["patches"] = num_patches
        metrics["cost"] = float(rank_costs(batch.costs, batch.assignment)[:, self.share.rank].sum())
        # Over `cost`, both summed over ranks, this is how much longer the slowest rank takes than the mean.
        metrics["slowest"] = slowest_rank_cost(batch.costs, batch.assignment)
        return LoadedArrays(
            arrays=arrays.arrays() | ({} if images is None else images.arrays()),
            num_valid=int(np.count_nonzero(arrays.labels != IGNORED)),
            offsets={} if images is None else images.offsets(),
            metrics=metrics | {"bad": len(bad)},
            bad=tuple(bad),
        )

    def _fetch(self, sample_id: int, images: ImageArrays | None, bad: list[BadSample]) -> PackedSample:
        """Return a packed sample and append its images; a blank sample if it is quarantined or bad."""
        numbers = range(*self._table.first_image[sample_id : sample_id + 2].tolist())
        sizes = np.asarray(self._table.image_sizes[numbers.start : numbers.stop])
        if sample_id not in self.quarantined:
            try:
                return retried(lambda: self._read(sample_id, numbers, sizes, images))
            except Exception as error:
                reason = f"{self._table.origin(sample_id)}: {error}"
                bad.append(BadSample(sample_id, reason[:MAX_REASON_CHARACTERS]))
        blank = self._packer.blank(int(self._sample_sizes.lengths[sample_id]), sizes)
        if images is not None:
            images.append_blank(blank.grids, blank.layouts)
        return blank

    def _read(self, sample_id: int, numbers: range, sizes: np.ndarray, images: ImageArrays | None) -> PackedSample:
        times = self._table.image_times[numbers.start : numbers.stop].tolist()
        packed = self._packer.pack(self._table.sample(sample_id), sizes, times)
        if len(packed) != min(self._sample_sizes.lengths[sample_id], self.packing.seq_len):
            raise BadSampleError(f"it has {len(packed)} tokens, but its index says otherwise")
        if images is not None:
            images.append(numbers, packed.grids, packed.layouts)
        return packed

    def _assign(self, step: int) -> RowAssignment:
        """Return the row assignment of a step. All ranks compute the same one."""
        if (cached := self._assignments.get(step)) is not None:
            return cached
        indices = np.arange(step * self.share.global_batch, (step + 1) * self.share.global_batch)
        real = indices if self._end is None else indices[indices < self._end]
        row_numbers = positions(self._options.seed, real, self.num_rows)
        rows = [self.packing.row(row) for row in row_numbers.tolist()]
        rows += [self.packing.samples[:0]] * (len(indices) - len(real))
        costs = self.packing.seq_len + np.array([self._extra_cost[row].sum() for row in rows])
        assignment = balance_rows(costs, self.share) if self._balance else sequential_rows(self.share)
        batch = RowAssignment(tuple(rows), costs, assignment)
        self._assignments = dict([*self._assignments.items(), (step, batch)][-MAX_CACHED_STEPS:])
        return batch

    def _lengths(self, row: np.ndarray) -> np.ndarray:
        return np.minimum(self._sample_sizes.lengths[row], self.packing.seq_len)

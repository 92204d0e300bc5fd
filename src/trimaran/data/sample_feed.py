"""Batches of samples of many lengths, with images or without: rows that hold several, dealt out by cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import DataSection, ImageRules, RowCost, UserError
from trimaran.data.feed import BadSample, DataShare, LoadedArrays
from trimaran.data.image_arrays import Features, ImageSheet
from trimaran.data.packed_sample import PackedSample, Scribe
from trimaran.data.quarantine import PAUSE_SECONDS, TRIES, BadSampleError
from trimaran.data.row_arrays import Sheet, spans_of
from trimaran.data.row_balance import deal_rows, in_order, slowest
from trimaran.data.row_packing import PackingRules, RowPacking, open_row_packing
from trimaran.data.sample_costs import Measures, SampleTable, measure
from trimaran.data.sample_order import positions
from trimaran.data.sequences import IGNORED

REMEMBERED = 8  # steps whose deal is kept: the loader asks for it again when it names the samples
REASON_CHARACTERS = 300


class Prepared(SampleTable, Protocol):
    """An index that knows where it is and how often its samples come; `samples.index.SampleIndex` is one."""

    @property
    def path(self) -> Path: ...

    def mixed(self, seed: int, keep: np.ndarray | None = None) -> np.ndarray: ...

    def holdout_mask(self, share: float, seed: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTerms:
    """What the model asks of its samples: how it takes images, if any, what they cost, and the seed of the run.

    With `features` it is given those in the place of patches. `vocabulary` is how many token ids it knows; None checks
    nothing.
    """

    rules: ImageRules | None
    cost: RowCost
    seed: int = 0
    vocabulary: int | None = None
    features: Features | None = None


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """A step's global batch: the samples of each row, what the rows cost, and who takes them.

    `places` are row numbers [grad_accum, dp, micro_batch].
    """

    rows: tuple[np.ndarray, ...]
    costs: np.ndarray
    places: np.ndarray

    def of(self, rank: int) -> list[np.ndarray]:
        """Return the rows of a rank, micro-batch by micro-batch."""
        return [self.rows[row] for row in self.places[:, rank].ravel()]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Samples laid out in rows, with what each of them amounts to."""

    table: SampleTable
    chart: RowPacking
    measures: Measures


def sample_feeds(
    section: DataSection,
    index: Prepared,
    terms: SampleTerms,
    *,
    share: DataShare,
    quarantined: frozenset[int] = frozenset(),
) -> tuple["SampleFeed", "SampleFeed | None"]:
    """Return what is trained on, and what is held out if there is any. Samples are held out whole, before they mix."""
    if terms.rules is None and len(index.image_sizes):
        raise UserError("T051", f"the data has {len(index.image_sizes):,} images, and this model does not see",
                        where="model.family", fix="use a model of family vlm, or data without images")  # fmt: skip
    measures = measure(index, terms.rules)
    rules = PackingRules(
        seq_len=section.seq_len, batching=section.samples.batching, seed=terms.seed, images=terms.rules
    )

    def rows_of(ids: np.ndarray) -> SampleRows:
        chart = open_row_packing(index, ids, measures, rules, folder=index.path.parent / "charts")
        return SampleRows(index, chart, measures)

    held = index.holdout_mask(section.holdout, terms.seed)
    training, holdout = rows_of(index.mixed(terms.seed, ~held)), rows_of(np.flatnonzero(held))
    if not len(training.chart):
        raise _nothing_left(training.chart)
    balance = section.samples.balance
    return (
        SampleFeed(training, terms, share=share, balance=balance, epochs=section.epochs, quarantined=quarantined),
        SampleFeed(holdout, terms, share=share, balance=balance) if len(holdout.chart) else None,
    )


class SampleFeed:
    """See `feed.Feed`. A sample's id is its number in the index.

    With `epochs`, rows behind the last of them are there and empty, on all ranks alike; without, there is no end.
    """

    def __init__(
        self,
        rows: SampleRows,
        terms: SampleTerms,
        *,
        share: DataShare,
        balance: bool = True,
        epochs: float = 0,
        quarantined: frozenset[int] = frozenset(),
    ) -> None:
        assert len(rows.chart) > 0
        self.share, self._terms, self._quarantined, self._balance = share, terms, quarantined, balance
        self._table, self._chart, self._measures = rows.table, rows.chart, rows.measures
        self._scribe = Scribe(terms.rules, self._chart.seq_len, terms.vocabulary)
        self._excess = self._measures.excess(terms.cost, self._chart.seq_len)
        self._end = self._rows_in(epochs) if epochs else None
        self._deals: dict[int, RowAssignment] = {}

    @property
    def chart(self) -> RowPacking:
        return self._chart

    @property
    def num_rows(self) -> int:
        """Rows of one pass over the data."""
        return len(self._chart)

    def steps_in(self, epochs: float) -> int:
        """Return how many steps so many passes over the data are; the last one may have empty rows."""
        return -(-self._rows_in(epochs) // self.share.global_batch)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        deal = self._deal(step)
        rows = [row for rank in data_ranks for row in deal.of(rank)]
        return tuple(np.concatenate(rows).tolist()) if rows else ()

    def num_quarantined(self, step: int) -> int:
        left_out = self._quarantined
        return len(left_out.intersection(self.samples(step, range(self.share.dp)))) if left_out else 0

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        deal = self._deal(step)
        rows = deal.of(self.share.rank)
        sheet = Sheet(
            self.share, self._chart.seq_len, sources=len(self._table.source_names) > 1, rules=self._terms.rules
        )
        images = self._image_sheet(rows)
        bad: list[BadSample] = []
        for number, row in enumerate(rows):
            if images is not None and number % self.share.micro_batch == 0:
                images.begin_micro_batch()
            pieces = []
            for sample_id in row.tolist():
                at(sample_id)
                pieces.append(self._fetch(sample_id, images, bad))
            spans = spans_of(self._lengths(row), self._chart.seq_len, self._chart.batching)
            sheet.write(number, spans, pieces, self._table.sources[row].tolist())
        return LoadedArrays(
            arrays=sheet.arrays() | ({} if images is None else images.arrays()),
            num_valid=int(np.count_nonzero(sheet.labels != IGNORED)),
            cuts={} if images is None else images.cuts(),
            facts=self._facts(deal, rows) | {"bad": len(bad)},
            bad=tuple(bad),
        )

    def _fetch(self, sample_id: int, images: ImageSheet | None, bad: list[BadSample]) -> PackedSample:
        """Return the piece of a sample, with its images on their sheet, or what keeps its place."""
        numbers = range(*self._table.first_image[sample_id : sample_id + 2].tolist())
        sizes = np.asarray(self._table.image_sizes[numbers.start : numbers.stop])
        if sample_id not in self._quarantined:
            try:
                return self._read(sample_id, numbers, sizes, images)
            except Exception as error:
                reason = f"{self._table.origin(sample_id)}: {error}"
                bad.append(BadSample(sample_id, reason[:REASON_CHARACTERS]))
        piece = self._scribe.blank(int(self._measures.lengths[sample_id]), sizes)
        if images is not None:
            images.leave_empty(piece.grids)
        return piece

    def _read(self, sample_id: int, numbers: range, sizes: np.ndarray, images: ImageSheet | None) -> PackedSample:
        """Return the piece of a sample, tried a few times: a disk across the network may do better in a moment."""
        for left in reversed(range(TRIES)):
            try:
                piece = self._scribe.spell(self._table.sample(sample_id), sizes)
                if len(piece) != min(self._measures.lengths[sample_id], self._chart.seq_len):
                    raise BadSampleError(f"it has {len(piece)} tokens, which is not what its index says")
                if images is not None:
                    images.put(numbers, piece.grids)
                return piece
            except Exception:
                if not left:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("it was tried at least once")

    def _image_sheet(self, rows: Sequence[np.ndarray]) -> ImageSheet | None:
        """Return a sheet with room for the images of these rows, or None when the model takes none."""
        if self._terms.rules is None:
            return None
        patches = int(sum(self._measures.patches[row].sum() for row in rows))
        size = patches if self._terms.features is None else patches // self._terms.rules.merge**2
        return ImageSheet(self._table, self._terms.rules, size, self._terms.features)

    def _facts(self, deal: RowAssignment, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Return what the metrics tell of this rank's rows: samples, useful and useless tokens, patches, and the cost.

        `slowest` over `cost`, both summed over ranks, is how much longer the slowest rank takes than the mean.
        """
        useful = int(sum(self._lengths(row).sum() for row in rows))
        patches = (
            {} if self._terms.rules is None else {"patches": sum(int(self._measures.patches[r].sum()) for r in rows)}
        )
        return {
            "samples": sum(map(len, rows)),
            "tokens": useful,
            "padding": len(rows) * self._chart.seq_len - useful,
            **patches,
            "cost": float(deal.costs[deal.places[:, self.share.rank]].sum()),
            "slowest": slowest(deal.costs, deal.places),
        }

    def _deal(self, step: int) -> RowAssignment:
        """Return the deal of a step. All ranks find the same one."""
        if (deal := self._deals.get(step)) is not None:
            return deal
        indices = np.arange(step * self.share.global_batch, (step + 1) * self.share.global_batch)
        real = indices if self._end is None else indices[indices < self._end]
        found = positions(self._terms.seed, real, self.num_rows)
        rows = [self._chart.row(row) for row in found.tolist()]
        rows += [self._chart.samples[:0]] * (len(indices) - len(real))
        costs = self._chart.seq_len + np.array([self._excess[row].sum() for row in rows])
        places = deal_rows(costs, self.share) if self._balance else in_order(self.share)
        deal = RowAssignment(tuple(rows), costs, places)
        self._deals = dict([*self._deals.items(), (step, deal)][-REMEMBERED:])
        return deal

    def _lengths(self, row: np.ndarray) -> np.ndarray:
        return np.minimum(self._measures.lengths[row], self._chart.seq_len)

    def _rows_in(self, epochs: float) -> int:
        return max(1, round(epochs * self.num_rows))


def _nothing_left(chart: RowPacking) -> UserError:
    reasons = ", ".join(f"{count:,} times {reason}" for reason, count in chart.left_out.items() if count)
    return UserError("T050", f"no sample is left to train on: {reasons or 'there is none'}", where="data.seq_len",
                     fix="use longer rows, fewer pixels (data.samples.max_pixels), or other data")  # fmt: skip

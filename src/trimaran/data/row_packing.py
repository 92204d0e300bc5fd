"""Packs samples of different lengths into rows of `seq_len` tokens, once per data set.

A longer sample is truncated, unless that would cut an image or leave no target: then it is left out and counted.
"""

import hashlib
import json
import zipfile
from bisect import bisect_right
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trimaran.core import ImageRules, RowCost, open_regular_file, replace_file
from trimaran.data.feed import positions
from trimaran.data.sample_costs import SampleSizes, SampleTable

FORMAT = "trimaran-chart-1"
PACKING_WINDOW_SAMPLES = 1 << 14  # samples packed together: enough to fill rows, few enough to keep the shuffle
# Typical costs of samples. Used only to mix samples, and the same for all models, so rows do not depend on the model.
TYPICAL_COST = RowCost(token_pair=4e-5, patch=0.2, patch_pair=4e-5)
COST_BANDS = (0.015, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4)  # deviation of a row from the mean cost, as a fraction of it
REJECTION_REASONS = ("an image would be cut", "no target would be left", "it is empty")

Batching = Literal["pack", "bucket", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """Packed rows: row r holds the sample ids `samples[offsets[r]:offsets[r + 1]]`, in this order.

    `num_truncated` counts truncated samples; `left_out` counts rejected samples by reason.
    """

    seq_len: int
    batching: Batching
    offsets: np.ndarray
    samples: np.ndarray
    num_truncated: int
    left_out: dict[str, int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> np.ndarray:
        """Return the ids of the samples of a row."""
        return self.samples[self.offsets[number] : self.offsets[number + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """What a row packing depends on, besides the samples."""

    seq_len: int
    batching: Batching = "pack"
    seed: int = 0
    images: ImageRules | None = None


def pack_samples(table: SampleTable, ids: np.ndarray, sample_sizes: SampleSizes, rules: PackingRules) -> RowPacking:
    """Return the rows of the samples `ids`, which may repeat."""
    unique, counts = np.unique(ids, return_counts=True)
    lengths = sample_sizes.lengths[unique]
    left_out = dict.fromkeys(REJECTION_REASONS, 0)
    left_out["it is empty"] = int(counts[lengths < 1].sum())
    fits = (lengths > 0) & (lengths <= rules.seq_len)
    num_truncated = 0
    for position in np.flatnonzero(lengths > rules.seq_len).tolist():
        reason = _reason_against_truncation(table, int(unique[position]), sample_sizes, rules)
        if reason is None:
            fits[position] = True
            num_truncated += int(counts[position])
        else:
            left_out[reason] += int(counts[position])
    keep = np.zeros(table.num_samples, dtype=bool)
    keep[unique[fits]] = True
    usable = np.asarray(ids)[keep[ids]]
    shuffled = usable[positions(rules.seed, np.arange(len(usable)), len(usable))] if len(usable) else usable
    lengths = np.minimum(sample_sizes.lengths[shuffled], rules.seq_len)
    extra_cost = sample_sizes.extra_cost(TYPICAL_COST, rules.seq_len)[shuffled]
    order, offsets = PACKERS[rules.batching](lengths, extra_cost, rules.seq_len)
    return RowPacking(
        seq_len=rules.seq_len,
        batching=rules.batching,
        offsets=offsets,
        samples=shuffled[order],
        num_truncated=num_truncated,
        left_out=left_out,
    )


def _reason_against_truncation(
    table: SampleTable, number: int, sample_sizes: SampleSizes, rules: PackingRules
) -> str | None:
    """Return why a sample that is too long cannot be truncated; None if it can."""
    sample = table.sample(number)
    weights = np.ones(len(sample.tokens), dtype=np.int64)
    if rules.images is not None and len(sample.images):
        is_image = sample.tokens == rules.images.image_token
        sizes = sample_sizes.image_tokens[sample.images.start : sample.images.stop]
        if int(is_image.sum()) == len(sizes):  # a mismatch is reported when the sample is loaded
            weights[is_image] = sizes
            if np.cumsum(weights)[is_image][-1] > rules.seq_len:
                return "an image would be cut"
    predicted_at = np.cumsum(weights)[1:] - 2  # the position before each token
    return None if sample.targets[1:][predicted_at < rules.seq_len].any() else "no target would be left"


def _pack(lengths: np.ndarray, extra_cost: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack best-fit, and mix expensive and cheap samples; see PACKERS.

    Samples are packed in windows of neighbours, longest first. A sample goes to the row where it leaves the least
    space. An expensive sample prefers rows that are cheap for their length, and a cheap one expensive rows.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for window in np.array_split(np.arange(len(lengths)), max(1, round(len(lengths) / PACKING_WINDOW_SAMPLES))):
        longest = window[np.argsort(-lengths[window], kind="stable")]
        mean = extra_cost[window].sum() / max(1, lengths[window].sum())
        open_rows = _OpenRows(seq_len, mean * seq_len, target_rows=-(-int(lengths[window].sum()) // seq_len))
        deviations = extra_cost[longest] - mean * lengths[longest]
        pairs = zip(lengths[longest].tolist(), deviations.tolist(), strict=True)
        rows[longest] = [open_rows.place(*each) for each in pairs]
        rows[longest] += num_rows
        num_rows += open_rows.num_rows
    return np.argsort(rows, kind="stable"), _offsets(np.bincount(rows, minlength=num_rows))


class _OpenRows:
    """Rows that still have space, grouped by cost band (from too cheap to too expensive) and by free tokens.

    `mean` is the average cost of a row beyond its tokens. While there are fewer than `target_rows` rows, a new row is
    better than one whose cost the sample would push further from the mean.
    """

    def __init__(self, seq_len: int, mean: float, *, target_rows: int) -> None:
        self._seq_len, self._target_rows, self.num_rows = seq_len, target_rows, 0
        self._edges = [mean * each for each in (*(-band for band in reversed(COST_BANDS)), 0.0, *COST_BANDS)]
        self._rows: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(len(self._edges) + 1)]
        self._free = [0] * len(self._rows)  # per band a bit set: bit n is set if a row has n free tokens
        self._deviations: list[float] = []
        self._band_orders = (range(len(self._rows)), range(len(self._rows) - 1, -1, -1))

    def place(self, length: int, deviation: float) -> int:
        """Return the row for a sample whose cost differs from the mean by `deviation`."""
        row, free = self._take(length, deviation <= 0)
        self._deviations[row] += deviation
        if left := free - length:
            band = bisect_right(self._edges, self._deviations[row])
            self._rows[band][left].append(row)
            self._free[band] |= 1 << left
        return row

    def _take(self, length: int, cheap: bool) -> tuple[int, int]:
        """Remove and return a row with at least `length` free tokens, and its number of free tokens."""
        for tried, band in enumerate(self._band_orders[cheap]):
            if tried == len(self._edges) // 2 + 1 and self.num_rows < self._target_rows:
                break
            if enough := self._free[band] >> length:
                free = length + (enough & -enough).bit_length() - 1
                rows = self._rows[band][free]
                row = rows.pop()
                if not rows:
                    self._free[band] ^= 1 << free
                return row, free
        self._deviations.append(0.0)
        self.num_rows += 1
        return self.num_rows - 1, self._seq_len


def _bucket(lengths: np.ndarray, extra_cost: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Put samples of similar length into a row; see PACKERS."""
    slots, sizes = slots_per_row(lengths, seq_len), list[int]()
    for bucket, count in zip(*(each.tolist() for each in np.unique(slots, return_counts=True)), strict=True):
        sizes += [bucket] * (count // bucket) + [count % bucket] * (count % bucket > 0)
    return np.argsort(slots, kind="stable"), _offsets(np.array(sizes, dtype=np.int64))


# Of the lengths and extra costs of samples, and seq_len: the order of the samples and the row offsets.
PACKERS = {
    "pack": _pack,
    "bucket": _bucket,
    "pad": lambda lengths, extra_cost, seq_len: (np.arange(len(lengths)), np.arange(len(lengths) + 1)),
}


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def slots_per_row(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the largest number of equal slots per row such that a sample of each length fits in one slot."""
    return seq_len // np.maximum(lengths, 1)


def open_row_packing(
    table: SampleTable, ids: np.ndarray, sample_sizes: SampleSizes, rules: PackingRules, *, folder: Path | None
) -> RowPacking:
    """Return the packing of these samples, read from the cache in `folder` or computed and saved there."""
    if folder is None:
        return pack_samples(table, ids, sample_sizes, rules)
    own = asdict(rules) | {"images": rules.images and rules.images.facts()}
    facts = [FORMAT, table.digest, hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(), own]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    path = folder / f"chart-{key}.npz"
    try:
        with open_regular_file(path, follow_links=True) as file, np.load(file, allow_pickle=False) as arrays:
            counts = arrays["counts"].tolist()
            offsets, samples = arrays["offsets"], arrays["samples"]  # reading verifies the CRC of the zip file
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        packing = pack_samples(table, ids, sample_sizes, rules)
        counts = [packing.num_truncated, *(packing.left_out[reason] for reason in REJECTION_REASONS)]
        with suppress(OSError):  # without a writable cache each start only takes some seconds longer
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as file:
                np.savez(file, offsets=packing.offsets, samples=packing.samples, counts=np.array(counts))
        return packing
    left_out = dict(zip(REJECTION_REASONS, counts[1:], strict=True))
    return RowPacking(
        seq_len=rules.seq_len,
        batching=rules.batching,
        offsets=offsets,
        samples=samples,
        num_truncated=counts[0],
        left_out=left_out,
    )

"""Rows of one length from samples of many: which samples lie in which row, decided once for a data set.

A row is never longer than `seq_len` tokens. What is longer is cut at its end, unless that would cut an image or leave
no target: then it is left out, and counted.
"""

import hashlib
import json
import os
import uuid
import zipfile
from bisect import bisect_right
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trimaran.core import ImageRules, RowCost
from trimaran.data.sample_costs import Measures, SampleTable
from trimaran.data.sample_order import positions

FORMAT = "trimaran-chart-1"
WINDOW = 1 << 14  # samples that are packed together: enough to fill rows, few enough that each pass mixes anew
# What makes samples dear in most models. It only mixes them, and is the same for all, so that no row depends on one.
TYPICAL = RowCost(token_pair=4e-5, patch=0.2, patch_pair=4e-5)
SHADES = (0.015, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4)  # how far off the mean a row is, as a share of what the mean costs
LEFT_OUT = ("an image would be cut", "no target would be left", "it is empty")

Batching = Literal["pack", "bucket", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """The rows: row r holds `samples[offsets[r]:offsets[r + 1]]`, ids of the index, in this order.

    `num_cut` samples are cut; `left_out` counts those that are not there, by reason.
    """

    seq_len: int
    batching: Batching
    offsets: np.ndarray
    samples: np.ndarray
    num_cut: int
    left_out: dict[str, int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> np.ndarray:
        """Return the ids of the samples of a row."""
        return self.samples[self.offsets[number] : self.offsets[number + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """What a chart is a function of, beside the samples."""

    seq_len: int
    batching: Batching = "pack"
    seed: int = 0
    images: ImageRules | None = None


def pack_samples(table: SampleTable, ids: np.ndarray, measures: Measures, rules: PackingRules) -> RowPacking:
    """Return the rows of the samples `ids`, each as often as it is there."""
    kept, num_cut, left_out = _usable(table, ids, measures, rules)
    mixed = kept[positions(rules.seed, np.arange(len(kept)), len(kept))] if len(kept) else kept
    lengths = np.minimum(measures.lengths[mixed], rules.seq_len)
    excess = measures.excess(TYPICAL, rules.seq_len)[mixed]
    order, offsets = MAKERS[rules.batching](lengths, excess, rules.seq_len)
    return RowPacking(
        seq_len=rules.seq_len,
        batching=rules.batching,
        offsets=offsets,
        samples=mixed[order],
        num_cut=num_cut,
        left_out=left_out,
    )


def _usable(
    table: SampleTable, ids: np.ndarray, measures: Measures, rules: PackingRules
) -> tuple[np.ndarray, int, dict[str, int]]:
    """Return the ids that can lie in a row, how many of them are cut, and how many are left out, by reason."""
    unique, counts = np.unique(ids, return_counts=True)
    lengths = measures.lengths[unique]
    found = dict.fromkeys(LEFT_OUT, 0)
    found["it is empty"] = int(counts[lengths < 1].sum())
    fits = (lengths > 0) & (lengths <= rules.seq_len)
    num_cut = 0
    for place in np.flatnonzero(lengths > rules.seq_len).tolist():
        reason = _spoiled(table, int(unique[place]), measures, rules)
        if reason is None:
            fits[place] = True
            num_cut += int(counts[place])
        else:
            found[reason] += int(counts[place])
    keep = np.zeros(table.num_samples, dtype=bool)
    keep[unique[fits]] = True
    return np.asarray(ids)[keep[ids]], num_cut, found


def _spoiled(table: SampleTable, number: int, measures: Measures, rules: PackingRules) -> str | None:
    """Return why a sample that is too long cannot be cut, or None when it can."""
    sample = table.sample(number)
    weights = np.ones(len(sample.tokens), dtype=np.int64)
    if rules.images is not None and len(sample.images):
        seen = sample.tokens == rules.images.image_token
        sizes = measures.image_tokens[sample.images.start : sample.images.stop]
        if int(seen.sum()) == len(sizes):  # what does not match is found, and told, where the sample is loaded
            weights[seen] = sizes
            if np.cumsum(weights)[seen][-1] > rules.seq_len:
                return "an image would be cut"
    predicted_at = np.cumsum(weights)[1:] - 2  # the token before it
    if not sample.targets[1:][predicted_at < rules.seq_len].any():
        return "no target would be left"
    return None


def _pack(lengths: np.ndarray, excess: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the samples and where each row begins: as many to a row as fit, dear beside cheap ones.

    In windows of neighbours: the longest first, each into the row where it leaves the least room, of those that cost
    too little for what they hold when it is dear, and too much when it is cheap.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for window in np.array_split(np.arange(len(lengths)), max(1, round(len(lengths) / WINDOW))):
        longest = window[np.argsort(-lengths[window], kind="stable")]
        mean = excess[window].sum() / max(1, lengths[window].sum())
        shelf = _Shelf(seq_len, mean * seq_len, most=-(-int(lengths[window].sum()) // seq_len))
        bends = excess[longest] - mean * lengths[longest]
        rows[longest] = [shelf.put(*each) for each in zip(lengths[longest].tolist(), bends.tolist(), strict=True)]
        rows[longest] += num_rows
        num_rows += shelf.num_rows
    return np.argsort(rows, kind="stable"), _offsets(np.bincount(rows, minlength=num_rows))


class _Shelf:
    """Rows that are being filled, by how far their cost is off (from too cheap to too dear) and the room they have.

    `mean` is what a row costs on average beside its tokens. As long as there are fewer than `most` rows, a new one is
    better than one that a sample would bend further.
    """

    def __init__(self, seq_len: int, mean: float, *, most: int) -> None:
        self._seq_len, self._most, self.num_rows = seq_len, most, 0
        self._edges = [mean * each for each in (*(-shade for shade in reversed(SHADES)), 0.0, *SHADES)]
        self._rows: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(len(self._edges) + 1)]
        self._rooms = [0] * len(self._rows)  # bit n is set when a row has room for n tokens: nothing is searched
        self._bends: list[float] = []
        self._ways = (range(len(self._rows)), range(len(self._rows) - 1, -1, -1))

    def put(self, length: int, bend: float) -> int:
        """Return the row that a sample goes to, whose cost beside the mean is `bend`."""
        row, room = self._take(length, bend <= 0)
        self._bends[row] += bend
        if left := room - length:
            shade = bisect_right(self._edges, self._bends[row])
            self._rows[shade][left].append(row)
            self._rooms[shade] |= 1 << left
        return row

    def _take(self, length: int, cheap: bool) -> tuple[int, int]:
        """Return a row with room for `length`, and its room. It is not on the shelf any more."""
        for tried, shade in enumerate(self._ways[cheap]):
            if tried == len(self._edges) // 2 + 1 and self.num_rows < self._most:
                break
            if enough := self._rooms[shade] >> length:
                room = length + (enough & -enough).bit_length() - 1
                rows = self._rows[shade][room]
                row = rows.pop()
                if not rows:
                    self._rooms[shade] ^= 1 << room
                return row, room
        self._bends.append(0.0)
        self.num_rows += 1
        return self.num_rows - 1, self._seq_len


def _bucket(lengths: np.ndarray, excess: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the samples and where each row begins: samples of about one length to a row."""
    places = num_places(lengths, seq_len)
    order = np.argsort(places, kind="stable")
    kinds, counts = np.unique(places, return_counts=True)
    sizes = []
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        sizes += [kind] * (count // kind) + [count % kind] * (count % kind > 0)
    return order, _offsets(np.array(sizes, dtype=np.int64))


def _pad(lengths: np.ndarray, excess: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the samples and where each row begins: one to a row."""
    return np.arange(len(lengths)), np.arange(len(lengths) + 1)


MAKERS = {"pack": _pack, "bucket": _bucket, "pad": _pad}


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def num_places(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return into how many equal places a row is divided so that samples of these lengths just fit in one."""
    return seq_len // np.maximum(lengths, 1)


def open_row_packing(
    table: SampleTable, ids: np.ndarray, measures: Measures, rules: PackingRules, *, folder: Path | None
) -> RowPacking:
    """Return the chart of these samples: read from `folder` when it was drawn before, else drawn and kept there."""
    if folder is None:
        return pack_samples(table, ids, measures, rules)
    path = folder / f"chart-{_key(table, ids, rules)}.npz"
    if (chart := _read(path, rules)) is None:
        chart = pack_samples(table, ids, measures, rules)
        with suppress(OSError):  # a folder that cannot be written to costs seconds at each start, and nothing else
            _write(path, chart)
    return chart


def _key(table: SampleTable, ids: np.ndarray, rules: PackingRules) -> str:
    facts = [FORMAT, table.digest, hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(), asdict(rules)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _read(path: Path, rules: PackingRules) -> RowPacking | None:
    """Return the chart at `path`, or None when there is none, or none that is whole."""
    try:
        with np.load(path, allow_pickle=False) as found:
            counts = found["counts"].tolist()
            offsets, samples = found["offsets"], found["samples"]  # reading checks the sums of the file
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    left_out = dict(zip(LEFT_OUT, counts[1:], strict=True))
    return RowPacking(
        seq_len=rules.seq_len,
        batching=rules.batching,
        offsets=offsets,
        samples=samples,
        num_cut=counts[0],
        left_out=left_out,
    )


def _write(path: Path, chart: RowPacking) -> None:
    """Put the chart at `path`, whole or not at all. Others may do the same: it is the same chart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        counts = [chart.num_cut, *(chart.left_out[reason] for reason in LEFT_OUT)]
        with draft.open("wb") as file:
            np.savez(file, offsets=chart.offsets, samples=chart.samples, counts=np.array(counts))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)

"""The arrays of one rank's step, written row by row."""

from collections.abc import Sequence

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.feed import DataShare
from trimaran.data.row_packing import Batching, slots_per_row
from trimaran.data.text.packed_sample import PackedSample, token_positions
from trimaran.data.text.token_shards import IGNORED
from trimaran.data.vision.grid_positions import grid_positions

Span = tuple[int, int]


def row_spans(lengths: np.ndarray, seq_len: int, batching: Batching) -> list[Span]:
    """Return the span (start, stop) of each sample of a row, including the padding after it.

    With `bucket`, all samples of a row get slots of the same size. Otherwise each span has the length of its sample and
    all padding is at the end of the row.
    """
    if batching == "bucket" and len(lengths):
        slot = seq_len // int(slots_per_row(lengths.max(), seq_len))
        return [(number * slot, (number + 1) * slot) for number in range(len(lengths))]
    stops = np.cumsum(lengths)
    return list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))


class RowArrays:
    """Tokens, labels and documents of all rows of a rank's step; optionally sources and position ids."""

    def __init__(self, share: DataShare, seq_len: int, *, sources: bool, rules: ImageRules | None) -> None:
        self._share, self._seq_len, self._rules = share, seq_len, rules
        shape = (share.grad_accum, share.micro_batch, seq_len)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.labels = np.full(shape, IGNORED, dtype=np.int64)
        self.documents = np.zeros(shape, dtype=np.int32)
        self.sources = np.zeros(shape, dtype=np.int8) if sources else None
        has_grid = rules is not None and rules.positions == "grid"
        self.positions = np.zeros((shape[0], 3, *shape[1:]), dtype=np.int64) if has_grid else None

    def write_row(
        self, number: int, spans: Sequence[Span], samples: Sequence[PackedSample], sources: Sequence[int]
    ) -> None:
        """Write a row. Each sample is a document of its own; the padding at the end is one more document."""
        row = divmod(number, self._share.micro_batch)
        end = spans[-1][1] if spans else 0
        for document, ((start, stop), sample, source) in enumerate(zip(spans, samples, sources, strict=True)):
            used = slice(start, start + len(sample))
            self.tokens[row][used], self.labels[row][used] = sample.tokens, sample.labels
            self.documents[row][start:stop] = document
            if self.sources is not None:
                self.sources[row][start:stop] = source
            if self.positions is not None:
                assert self._rules is not None
                self._write_positions(row, start, token_positions(sample, self._rules, stop - start))
        self.documents[row][end:] = len(spans)
        self._write_positions(row, end, grid_positions(self._seq_len - end, ()))

    def _write_positions(self, row: tuple[int, int], start: int, positions: np.ndarray) -> None:
        if self.positions is not None:
            self.positions[row[0], :, row[1], start : start + positions.shape[1]] = positions

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by their input names."""
        always = {"tokens": self.tokens, "labels": self.labels, "documents": self.documents}
        optional = {"sources": self.sources, "positions": self.positions}
        return always | {name: each for name, each in optional.items() if each is not None}

"""The arrays of one rank's step, written row by row."""

from collections.abc import Sequence

import numpy as np

from trimaran.core import ImageRules
from trimaran.data.feed import DataShare
from trimaran.data.packed_sample import PackedSample, place_tokens
from trimaran.data.row_packing import Batching, num_places
from trimaran.data.sequences import IGNORED
from trimaran.data.vision.grid_positions import grid_positions

Span = tuple[int, int]


def spans_of(lengths: np.ndarray, seq_len: int, batching: Batching) -> list[Span]:
    """Return from where to where each sample of a row may write, itself and the padding behind it.

    In a bucket each has a place of the same size; otherwise each has its own length, and all padding is at the end.
    """
    if batching == "bucket" and len(lengths):
        place = seq_len // int(num_places(lengths.max(), seq_len))
        return [(number * place, (number + 1) * place) for number in range(len(lengths))]
    stops = np.cumsum(lengths)
    return list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))


class Sheet:
    """Tokens, labels, documents, and where they are asked for sources and positions, of all rows of a rank's step."""

    def __init__(self, share: DataShare, seq_len: int, *, sources: bool, rules: ImageRules | None) -> None:
        self._share, self._seq_len, self._rules = share, seq_len, rules
        shape = (share.grad_accum, share.micro_batch, seq_len)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.labels = np.full(shape, IGNORED, dtype=np.int64)
        self.documents = np.zeros(shape, dtype=np.int32)
        self.sources = np.zeros(shape, dtype=np.int8) if sources else None
        gridded = rules is not None and rules.positions == "grid"
        self.positions = np.zeros((shape[0], 3, *shape[1:]), dtype=np.int64) if gridded else None

    def write(self, number: int, spans: Sequence[Span], pieces: Sequence[PackedSample], sources: Sequence[int]) -> None:
        """Write a row: its pieces, each a document of its own in its span, and the padding, which is one more."""
        place = divmod(number, self._share.micro_batch)
        end = spans[-1][1] if spans else 0
        for document, ((start, stop), piece, source) in enumerate(zip(spans, pieces, sources, strict=True)):
            used = slice(start, start + len(piece))
            self.tokens[place][used], self.labels[place][used] = piece.tokens, piece.labels
            self.documents[place][start:stop] = document
            if self.sources is not None:
                self.sources[place][start:stop] = source
            if self.positions is not None:
                assert self._rules is not None
                self._lay(place, start, place_tokens(piece, self._rules, stop - start))
        self.documents[place][end:] = len(spans)
        self._lay(place, end, grid_positions(self._seq_len - end, ()))

    def _lay(self, place: tuple[int, int], start: int, found: np.ndarray) -> None:
        if self.positions is not None:
            self.positions[place[0], :, place[1], start : start + found.shape[1]] = found

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by the names that networks know."""
        named = {"tokens": self.tokens, "labels": self.labels, "documents": self.documents}
        more = {"sources": self.sources, "positions": self.positions}
        return named | {name: each for name, each in more.items() if each is not None}

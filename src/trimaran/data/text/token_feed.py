"""Batches of packed text: sequences of one length, in the order of the seed."""

from collections.abc import Callable, Sequence

import numpy as np

from trimaran.data.feed import DataShare, LoadedArrays, QuarantiningFeed, positions
from trimaran.data.quarantine import SampleReader, blank_sample
from trimaran.data.text.token_shards import IGNORED, Sequences

ORDERED_ROWS = 1024  # whose order is computed at once, which takes three times as long as that of one row


class TokenFeed(QuarantiningFeed):
    """A `feed.BatchFeed` of text. A sample is a sequence; its id is its index in the shards.

    With `epochs`, rows after the last epoch are blank on all ranks alike, so the last batch has the usual size and
    every sequence occurs equally often. Without, the feed has no end.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        seed: int,
        share: DataShare,
        reader: SampleReader | None = None,
        epochs: float = 0.0,
    ) -> None:
        assert len(sequences) > 0
        self._sequences, self._seed, self._reader = sequences, seed, reader or SampleReader()
        self.quarantined = self._reader.quarantined
        self.num_rows = len(sequences)
        self._end = self.rows_in(epochs) if epochs else None
        self.share = share
        self._ordered_steps = max(1, ORDERED_ROWS // (share.micro_batch * share.grad_accum))
        self._ordered: tuple[range, list[tuple[int, ...]]] = (range(0), [])  # steps, and this rank's samples of each

    def with_share(self, share: DataShare) -> "TokenFeed":
        """Return a feed of the same samples that deals them out as `share` says."""
        return TokenFeed(self._sequences, seed=self._seed, share=share, reader=self._reader)

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        shape = (self.share.grad_accum, self.share.micro_batch, self._sequences.seq_len)
        tokens, labels = (np.empty(shape, dtype=np.int64) for _ in range(2))
        rows = []
        for sample_id in self.samples(step, [self.share.rank]):
            at(sample_id)
            rows.append(self._reader.load(self._sequences, sample_id - self._sequences.first))
        rows += [blank_sample(self._sequences)] * (shape[0] * shape[1] - len(rows))
        for number, row in enumerate(rows):
            tokens.reshape(-1, shape[-1])[number] = row.tokens
            labels.reshape(-1, shape[-1])[number] = row.labels
        arrays: dict[str, np.ndarray] = {"tokens": tokens, "labels": labels}
        if self._sequences.isolate:
            arrays["documents"] = np.array([row.documents for row in rows], dtype=np.int32).reshape(shape)
        return LoadedArrays(arrays=arrays, num_valid=int(np.count_nonzero(labels != IGNORED)))

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        if [*data_ranks] != [self.share.rank]:
            return self._samples(range(step, step + 1), data_ranks)[0]
        steps, samples = self._ordered
        if step not in steps:
            first = step - step % self._ordered_steps
            steps = range(max(first, self.share.first_step), first + self._ordered_steps)
            samples = self._samples(steps, data_ranks)
            self._ordered = steps, samples
        return samples[step - steps.start]

    def _samples(self, steps: range, data_ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the sample ids of the ranks in each of the steps."""
        indices = self.share.rows_of(steps, data_ranks)
        ids = self._sequences.first + positions(self._seed, indices, len(self._sequences))
        if self._end is None:
            return [*map(tuple, ids.tolist())]
        return [tuple(row[inside].tolist()) for row, inside in zip(ids, indices < self._end, strict=True)]

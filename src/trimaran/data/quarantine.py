"""Samples that are left out of training, and the check that every sample passes on its way into a batch.

A sample that is left out keeps its place: its row is there, without a target. So the order of samples, the size of the
batch and all other samples stay what they were.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import UserError
from trimaran.data.sequences import IGNORED, Sequences, TokenSample
from trimaran.run import append_line

TRIES = 3
PAUSE_SECONDS = 0.1
MAX_BYTES = 64 << 20


class BadSampleError(Exception):
    """A sample was loaded and cannot be used."""


class Quarantine:
    """The samples to leave out, by id. The list must be the same on all ranks: one reads it and tells the others."""

    def __init__(self, ids: Iterable[int] = (), *, path: Path | None = None) -> None:
        self.ids = frozenset(ids)
        self._path = path

    def add(self, ids: Iterable[int], reason: str, step: int, *, write: bool) -> None:
        """Leave these out too. Every rank calls it with the same ids; the one that may `write` files them."""
        new = sorted(set(ids) - self.ids)
        self.ids |= frozenset(new)
        if write and self._path is not None:
            for each in new:
                append_line(self._path, {"sample": each, "reason": reason, "step": step})


def read_quarantine(path: Path) -> tuple[int, ...]:
    """Return the ids in a file of JSON lines, sorted; none when there is no such file."""
    if not path.exists():
        return ()
    found: set[int] = set()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)["sample"]
            if type(sample) is not int or not 0 <= sample < 2**63:
                raise ValueError(f"{sample!r} is not the number of a sample")
            found.add(sample)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("T021", f"the list of samples to leave out cannot be read: {error!r}", where=str(path),
                        fix='mend the line or delete it; a line looks like {"sample": 12}') from None  # fmt: skip
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """How a sample gets into a batch: tried a few times, checked, and masked when it is in quarantine.

    `vocabulary` is how many token ids the model knows; None checks nothing.
    """

    vocabulary: int | None = None
    quarantined: frozenset[int] = frozenset()

    def load(self, sequences: Sequences, index: int) -> TokenSample:
        """Return sample `index` of the sequences, fit to be trained on."""
        if sequences.first + index in self.quarantined:
            return without_target(sequences)
        for _ in range(TRIES - 1):
            try:
                return self._checked(sequences, index)
            except Exception:  # a disk across the network may do better in a moment
                time.sleep(PAUSE_SECONDS)
        return self._checked(sequences, index)

    def _checked(self, sequences: Sequences, index: int) -> TokenSample:
        sample = sequences[index]
        parts = [sample.tokens, sample.labels] + ([] if sample.documents is None else [sample.documents])
        for part in parts:
            if part.shape != (sequences.seq_len,):
                raise BadSampleError(f"a part of it has shape {part.shape} instead of ({sequences.seq_len},)")
        if self.vocabulary is not None:
            for part in (sample.tokens, sample.labels[sample.labels != IGNORED]):
                if part.size and (part.min() < 0 or part.max() >= self.vocabulary):
                    worst = part.min() if part.min() < 0 else part.max()
                    raise BadSampleError(f"token id {worst} is not one of the model's {self.vocabulary}")
        return sample


def without_target(sequences: Sequences) -> TokenSample:
    """Return a row that keeps a place and teaches nothing."""
    nothing = np.zeros(sequences.seq_len, dtype=np.int64)
    return TokenSample(nothing, np.full_like(nothing, IGNORED), nothing if sequences.isolate else None)

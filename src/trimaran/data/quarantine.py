"""Quarantined samples, and the check that every text sample passes before it enters a batch.

A quarantined sample keeps its row, without targets. So the order of samples, the batch size and all other samples do
not change.
"""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from trimaran.core import UserError, read_regular_text, templated
from trimaran.data.text.token_shards import IGNORED, Sequences, TokenSample
from trimaran.runs import RunDirectory, append_line

READ_ATTEMPTS = 3
RETRY_PAUSE_SECONDS = 0.1
MAX_QUARANTINE_BYTES = 64 << 20
Result = TypeVar("Result")


class BadSampleError(Exception):
    """A sample cannot be used; the message says why."""


class Quarantine:
    """The ids of quarantined samples. The set must be equal on all ranks: one rank reads it and broadcasts it."""

    def __init__(self, ids: Iterable[int] = (), *, path: Path | None = None) -> None:
        self.ids = frozenset(ids)
        self._path = path

    def add(self, ids: Iterable[int], reason: str, step: int, *, write: bool) -> None:
        """Quarantine these ids too. Every rank passes the same ids; the rank with `write` appends to the file."""
        new = sorted(set(ids) - self.ids)
        self.ids |= frozenset(new)
        if write and self._path is not None:
            for each in new:
                line = {"sample": each, "reason": reason, "step": step}
                append_line(self._path, line, reserve=RunDirectory(self._path.parent).reserve)


def read_quarantine(path: Path) -> tuple[int, ...]:
    """Return the ids in a JSONL file, sorted; an empty tuple if the file does not exist."""
    if not path.exists():
        return ()
    found: set[int] = set()
    try:
        if path.stat().st_size > MAX_QUARANTINE_BYTES:
            raise ValueError(
                templated("it is larger than {max_quarantine_bytes} bytes", max_quarantine_bytes=MAX_QUARANTINE_BYTES)
            )
        for line in read_regular_text(path).splitlines():
            sample = json.loads(line)["sample"]
            if type(sample) is not int or not 0 <= sample < 2**63:
                raise ValueError(f"{sample!r} is not a sample id")
            found.add(sample)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError("T021.quarantine-list", where=str(path), error=error) from None
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """Reads text samples: retries reads, checks them (ids below `vocabulary`; None: any), blanks quarantined ones."""

    vocabulary: int | None = None
    quarantined: frozenset[int] = frozenset()

    def load(self, sequences: Sequences, index: int) -> TokenSample:
        """Return sample `index` of the sequences, checked; blank if it is quarantined."""
        if sequences.first + index in self.quarantined:
            return blank_sample(sequences)
        return retried(lambda: self._checked(sequences, index))

    def _checked(self, sequences: Sequences, index: int) -> TokenSample:
        sample = sequences[index]
        for part in (sample.tokens, sample.labels, sample.documents):
            if part is not None and part.shape != (sequences.seq_len,):
                raise BadSampleError(f"one of its arrays has shape {part.shape} instead of ({sequences.seq_len},)")
        # Ids below 0, and so ignored labels, are large as unsigned numbers.
        if self.vocabulary is not None and not all(
            each.dtype == np.int64 and each.view(np.uint64).max() < self.vocabulary
            for each in (sample.tokens, sample.labels)
        ):
            for part in (sample.tokens, sample.labels[sample.labels != IGNORED]):
                check_token_ids(part, self.vocabulary)
        return sample


def check_token_ids(ids: np.ndarray, vocabulary: int | None) -> None:
    """Raise BadSampleError for an id outside of the vocabulary; None: any id may occur."""
    if vocabulary is not None and ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise BadSampleError(f"token id {worst} is not one of the model's {vocabulary}")


def retried(read: Callable[[], Result]) -> Result:
    """Return what `read` does, after a few tries: a network file system may recover within a moment."""
    for _ in range(READ_ATTEMPTS - 1):
        with suppress(Exception):
            return read()
        time.sleep(RETRY_PAUSE_SECONDS)
    return read()


def blank_sample(sequences: Sequences) -> TokenSample:
    """Return a sample of zeros without targets."""
    zeros = np.zeros(sequences.seq_len, dtype=np.int64)
    return TokenSample(zeros, np.full_like(zeros, IGNORED), zeros if sequences.isolate else None)

"""Loaders of a few short sequences, and sequences that are slow, raise, crash the process or hang."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.data import (
    ByteTokenizer,
    DataShare,
    LoaderLimits,
    SampleReader,
    Sequences,
    ShardWriter,
    TokenFeed,
    TokenSample,
    TokenShards,
)
from trimaran.data import Loader as AnyLoader

LARGE_LIMITS = LoaderLimits(cores=4, free_bytes=1 << 30)
ALONE = DataShare(rank=0, dp=1, micro_batch=2, grad_accum=1)


def Loader(  # noqa: N802 - a loader of sequences
    sequences: Sequences, *, seed: int, share: DataShare, reader: SampleReader | None = None, **options: Any
) -> AnyLoader:
    return AnyLoader(TokenFeed(sequences, seed=seed, share=share, reader=reader), **options)


def small_shards(path: Path) -> TokenShards:
    """Return 41 sequences of 8 tokens in documents of 3 to 12 bytes."""
    with ShardWriter(path, ByteTokenizer(), shard_tokens=50) as writer:
        for number in range(41):
            writer.append(np.full(3 + number % 10, number))
            writer.end_document()
    return TokenShards.open(path)


class Slow(Sequences):
    """Takes 20 ms per sample."""

    def __getitem__(self, index: int) -> TokenSample:
        time.sleep(0.02)
        return super().__getitem__(index)


class Raising(Sequences):
    """Raises at sample 5: always, or `failures` times."""

    failures = (math.inf,)

    def __getitem__(self, index: int) -> TokenSample:
        if index == 5 and self.failures[0] > 0:
            if isinstance(self.failures, list):
                self.failures[0] -= 1
            raise RuntimeError("the disk is on fire")
        return super().__getitem__(index)


class Crashing(Sequences):
    """Kills the process that loads sample 5."""

    def __getitem__(self, index: int) -> TokenSample:
        if index == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Damaged(Sequences):
    """Damages the tokens of sample 5."""

    damage: Callable[[np.ndarray], np.ndarray]

    def __getitem__(self, index: int) -> TokenSample:
        sample = super().__getitem__(index)
        return replace(sample, tokens=self.damage(sample.tokens)) if index == 5 else sample


class Hanging(Sequences):
    """Hangs at sample 5."""

    def __getitem__(self, index: int) -> TokenSample:
        if index == 5:
            time.sleep(1000)
        return super().__getitem__(index)


def like(kind: type[Sequences], sequences: Sequences) -> Sequences:
    return kind(sequences.shards, sequences.seq_len, sequences.isolate, sequences.first, sequences.last)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds

"""Fixed-length sequences of the token stream, and the split into training and holdout."""

from dataclasses import dataclass

import numpy as np

from trimaran.core import DataSection, UserError
from trimaran.data.token_shards import TokenShards

IGNORED = -100


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence. `labels` are the next tokens, IGNORED where there is no target.

    `documents` numbers the documents of the sequence from 0; None if attention may cross document boundaries.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences `first` to `last` (exclusive) of the shards; sample i is the i-th of them.

    Neighbours overlap by one token: the last target of one is the first input of the next. So no target occurs twice.
    """

    shards: TokenShards
    seq_len: int
    isolate: bool
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> TokenSample:
        assert 0 <= index < len(self)
        start = (self.first + index) * self.seq_len
        stop = start + self.seq_len + 1
        tokens = self.shards.tokens(start, stop)
        inputs, labels = tokens[:-1], tokens[1:]
        if not self.isolate:
            return TokenSample(inputs, labels, None)
        documents = self.shards.documents(start, stop)
        labels = np.where(documents[1:] == documents[:-1], labels, IGNORED)
        return TokenSample(inputs, labels, (documents[:-1] - documents[0]).astype(np.int32))


def split(shards: TokenShards, section: DataSection) -> tuple[Sequences, Sequences]:
    """Return the training sequences and the holdout (the last `holdout` fraction), which may be empty."""
    count = count_sequences(shards, section.seq_len)
    num_held_out = min(max(1, round(count * section.holdout)), count - 1) if section.holdout > 0 else 0
    train = Sequences(shards, section.seq_len, section.isolate_documents, 0, count - num_held_out)
    return train, Sequences(shards, section.seq_len, section.isolate_documents, count - num_held_out, count)


def count_sequences(shards: TokenShards, seq_len: int) -> int:
    """Return the number of sequences in the shards. Raises if there is not even one."""
    if count := (shards.num_tokens - 1) // seq_len:
        return count
    shorter = f", or set data.seq_len to at most {shards.num_tokens - 1}" if shards.num_tokens > 2 else ""
    raise UserError("T010", f"the data has {shards.num_tokens:,} tokens, but one sequence needs {seq_len + 1:,}",
                    where="data.seq_len", fix=f"add data{shorter}")  # fmt: skip

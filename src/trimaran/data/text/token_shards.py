"""Packed tokens on disk: a folder of shards, see `array_folder`.

Samples are fixed-length sequences of their token stream, split into training and holdout.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import DataSection, UserError, read_regular_text
from trimaran.data.feed import num_held_out
from trimaran.data.text.array_folder import BAD, DTYPES, META, ArrayFolderWriter, map_array, read_bad
from trimaran.data.text.bad_lines import BadLines
from trimaran.data.text.tokenizer import Tokenizer, open_tokenizer

FORMAT = "trimaran-shards-1"
SHARD_TOKENS = 1 << 27
ENDS_DTYPE = np.dtype("<i8")

Positive = Annotated[int, Field(ge=1)]
IGNORED = -100


class Shard(BaseModel):
    """One shard, a pair of files. `sha256` covers the tokens, then the document ends."""

    model_config = ConfigDict(frozen=True)

    file: Annotated[str, Field(pattern=r"^shard-\d{5,}\.tokens$")]
    num_tokens: Positive
    num_documents: Positive
    sha256: str


class TokenShardsMeta(BaseModel):
    """The content of `meta.json`. A document never spans shards and always ends with `end_id`."""

    model_config = ConfigDict(frozen=True)

    format: Literal["trimaran-shards-1"] = FORMAT
    dtype: Literal["uint16", "uint32"]
    vocab_size: Positive
    end_id: int
    tokenizer: dict[str, str]
    num_tokens: Positive
    num_documents: Positive
    num_lines: Annotated[int, Field(ge=0)] = 0  # lines of the source that were read; 0: not counted
    num_bad: Annotated[int, Field(ge=0)] = 0  # lines that were left out; the first of them are in bad.jsonl
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]


class ShardWriter(ArrayFolderWriter):
    """Writes a folder of shards."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS) -> None:
        super().__init__(path, tokenizer, tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self.bad: BadLines | None = None  # the lines that were read, and which of them were left out

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self._shards) + len(self._ends)

    def append(self, ids: np.ndarray) -> None:
        """Add tokens to the current document."""
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size
        data = ids.astype(DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._num_tokens += len(ids)

    def end_document(self) -> None:
        self.append(np.array([self._tokenizer.end_id]))
        self._ends.append(self._num_tokens)
        if self._num_tokens >= self._shard_tokens:
            self._finish_shard()
            self._begin()

    def _begin(self) -> None:
        self._file = (self._draft / f"shard-{len(self._shards):05d}.tokens").open("wb")
        self._hash = hashlib.sha256()
        self._num_tokens = 0
        self._ends: list[int] = []

    def _finish_shard(self) -> None:
        self._file.close()
        file = Path(self._file.name)
        if not self._ends:
            file.unlink()  # the last document filled the previous shard
            return
        assert self._ends[-1] == self._num_tokens, "the last document was not ended"
        ends = np.array(self._ends, dtype=ENDS_DTYPE).tobytes()
        file.with_suffix(".documents").write_bytes(ends)
        self._hash.update(ends)
        digest, count = self._hash.hexdigest(), len(self._ends)
        self._shards.append(Shard(file=file.name, num_tokens=self._num_tokens, num_documents=count, sha256=digest))
        self._ends = []

    def _close(self) -> None:
        self._file.close()

    def _finish(self) -> TokenShardsMeta:
        self._finish_shard()
        if self.bad is not None and self.bad.listed:
            lines = "".join(json.dumps(entry) + "\n" for entry in self.bad.listed)
            (self._draft / BAD).write_text(lines, encoding="utf-8")
        self._tokenizer.save(self._draft)
        return TokenShardsMeta(
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            end_id=self._tokenizer.end_id,
            tokenizer=self._tokenizer.describe(),
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self.num_documents,
            num_lines=self.bad.num_lines if self.bad else 0,
            num_bad=self.bad.num_bad if self.bad else 0,
            shards=tuple(self._shards),
        )


class TokenShards:
    """Random access to the tokens of a folder of shards, numbered across shards."""

    def __init__(self, path: Path, meta: TokenShardsMeta) -> None:
        self.path, self.meta = path, meta
        self.num_tokens, self.num_documents, self.vocab_size = meta.num_tokens, meta.num_documents, meta.vocab_size
        self._starts = [0, *accumulate(shard.num_tokens for shard in meta.shards)]
        self._first_documents = [0, *accumulate(shard.num_documents for shard in meta.shards)]
        self._tokens, self._ends = list[np.ndarray](), list[np.ndarray]()
        for shard in meta.shards:
            ends_file = (path / shard.file).with_suffix(".documents")
            self._tokens.append(map_array(path / shard.file, DTYPES[meta.dtype], shard.num_tokens, _damaged))
            self._ends.append(map_array(ends_file, ENDS_DTYPE, shard.num_documents, _damaged))
            if self._ends[-1][-1] != shard.num_tokens:
                raise _damaged(ends_file, "its last document does not end at the last token")
        if (meta.num_tokens, meta.num_documents) != (self._starts[-1], self._first_documents[-1]):
            raise _damaged(path / META, "its counts do not add up")

    @property
    def digest(self) -> str:
        """A hash of the tokens, 64 hexadecimal digits, computed from the checksums in `meta.json`.

        The files of a model's own tokenizer are part of it; a JSON file and bytes are not, as in earlier versions.
        """
        parts: list[object] = [self.meta.dtype, self.meta.end_id]
        parts += [(each.num_tokens, each.sha256) for each in self.meta.shards]
        if self.meta.tokenizer.get("kind") == "model":
            parts.append(self.meta.tokenizer["sha256"])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the shards at `path`. Checks only file sizes; `verify` checks the content."""
        try:
            return cls(path, TokenShardsMeta.model_validate_json(read_regular_text(path / META, follow_links=True)))
        except (OSError, UnicodeDecodeError):
            reason = f"it has no readable {META}"
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, mistake['loc'])) or 'the object'} in {META}: {mistake['msg']}"
        raise UserError("T014.not-folder-packed", where=str(path), reason=reason)

    @cached_property
    def bad(self) -> list[dict[str, str]]:
        """The first lines that were left out, as {where, code, reason}."""
        return read_bad(self.path) if self.meta.num_bad else []

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the shards were packed with; it is stored with them."""
        return open_tokenizer(self.meta.tokenizer, self.path)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of a range as int64."""
        parts = [self._tokens[shard][low:high] for shard, low, high in self._parts(start, stop)]
        return parts[0].astype(np.int64) if len(parts) == 1 else np.concatenate(parts, dtype=np.int64)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Return the document number of each token of a range, counted over all shards, as int64."""
        parts = []
        for shard, low, high in self._parts(start, stop):
            ends = self._ends[shard]
            first, last = np.searchsorted(ends, (low, high - 1), side="right")
            lengths = np.diff(ends[first:last], prepend=low, append=high)
            parts.append(np.repeat(np.arange(first, last + 1) + self._first_documents[shard], lengths))
        return np.concatenate(parts, dtype=np.int64)

    def verify(self) -> None:
        """Raise unless all checksums match. Reads all files."""
        for shard, tokens, ends in zip(self.meta.shards, self._tokens, self._ends, strict=True):
            digest = hashlib.sha256(tokens.data)
            digest.update(ends.data)
            if digest.hexdigest() != shard.sha256:
                raise _damaged(self.path / shard.file, "its checksum differs")

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, low, high) for each shard that the range overlaps; low and high are relative to the shard."""
        assert 0 <= start < stop <= self.num_tokens
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[shard], min(stop, self._starts[shard + 1])
            yield shard, start - base, end - base
            start, shard = end, shard + 1


def _damaged(file: Path, what: str) -> UserError:
    return UserError("T015.file-packed-shards", where=str(file), text=what, parent=file.parent)


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence. `labels` are the next tokens or IGNORED, `documents` count from 0; None: attention crosses them."""

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences `first` to `last` (exclusive), which overlap by one token, so that no target occurs twice."""

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
    end, isolate = count - num_held_out(count, section.holdout), section.isolate_documents
    return (
        Sequences(shards, section.seq_len, isolate, 0, end),
        Sequences(shards, section.seq_len, isolate, end, count),
    )


def count_sequences(shards: TokenShards, seq_len: int) -> int:
    """Return the number of sequences in the shards. Raises if there is not even one."""
    if count := (shards.num_tokens - 1) // seq_len:
        return count
    shorter = f", or set data.seq_len to at most {shards.num_tokens - 1}" if shards.num_tokens > 2 else ""
    raise UserError(
        "T010.data-tokens", where="data.seq_len", num_tokens=shards.num_tokens, seq_len=seq_len + 1, shorter=shorter
    )

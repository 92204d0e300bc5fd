"""Packed tokens on disk: a folder of memory-mapped shards that is complete or absent, and is never written over."""

import hashlib
import json
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimaran.core import UserError
from trimaran.data.tokenizer import Tokenizer, open_tokenizer

FORMAT = "trimaran-shards-1"
META = "meta.json"
SHARD_TOKENS = 1 << 27
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")

Positive = Annotated[int, Field(ge=1)]


class Shard(BaseModel):
    """One pair of files. `sha256` covers the tokens, then the ends of the documents."""

    model_config = ConfigDict(frozen=True)

    file: Annotated[str, Field(pattern=r"^shard-\d{5,}\.tokens$")]
    num_tokens: Positive
    num_documents: Positive
    sha256: str


class TokenShardsMeta(BaseModel):
    """The content of `meta.json`. Documents never straddle shards; every document ends with `end_id`."""

    model_config = ConfigDict(frozen=True)

    format: Literal["trimaran-shards-1"] = FORMAT
    dtype: Literal["uint16", "uint32"]
    vocab_size: Positive
    end_id: int
    tokenizer: dict[str, str]
    num_tokens: Positive
    num_documents: Positive
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]


class ShardWriter:
    """Writes a folder of shards beside `path` and renames it into place when the `with` block ends well.

    When the block fails nothing is left behind. When somebody else has put shards there meanwhile, theirs stay and
    FileExistsError is raised.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self._path, self._tokenizer, self._shard_tokens = path.absolute(), tokenizer, shard_tokens
        self._draft = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:12]}")
        self._dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._shards: list[Shard] = []

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self._shards) + len(self._ends)

    def __enter__(self) -> Self:
        self._draft.mkdir(parents=True)
        self._begin_shard()
        return self

    def append(self, ids: np.ndarray) -> None:
        """Add tokens to the document at hand."""
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
            self._begin_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish_shard()
                self._tokenizer.save(self._draft)
                (self._draft / META).write_text(self._meta().model_dump_json(indent=2) + "\n", encoding="utf-8")
                rename_into_place(self._draft, self._path)
        finally:
            self._file.close()
            shutil.rmtree(self._draft, ignore_errors=True)  # gone already when it was renamed

    def _begin_shard(self) -> None:
        self._file = (self._draft / f"shard-{len(self._shards):05d}.tokens").open("wb")
        self._hash = hashlib.sha256()
        self._num_tokens = 0
        self._ends: list[int] = []

    def _finish_shard(self) -> None:
        self._file.close()
        file = Path(self._file.name)
        if not self._ends:
            file.unlink()  # the shard before it was full when the last document ended
            return
        assert self._ends[-1] == self._num_tokens, "the last document was not ended"
        ends = np.array(self._ends, dtype=ENDS_DTYPE).tobytes()
        file.with_suffix(".documents").write_bytes(ends)
        self._hash.update(ends)
        self._shards.append(
            Shard(
                file=file.name,
                num_tokens=self._num_tokens,
                num_documents=len(self._ends),
                sha256=self._hash.hexdigest(),
            )
        )
        self._ends = []

    def _meta(self) -> TokenShardsMeta:
        return TokenShardsMeta(
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            end_id=self._tokenizer.end_id,
            tokenizer=self._tokenizer.describe(),
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self.num_documents,
            shards=tuple(self._shards),
        )


class TokenShards:
    """Random access to the tokens of a folder of shards, numbered as if they were one file."""

    def __init__(self, path: Path, meta: TokenShardsMeta) -> None:
        self.path, self.meta = path, meta
        self._starts = [0, *accumulate(shard.num_tokens for shard in meta.shards)]
        self._first_documents = [0, *accumulate(shard.num_documents for shard in meta.shards)]
        self._tokens = [_map(path / shard.file, DTYPES[meta.dtype], shard.num_tokens) for shard in meta.shards]
        self._ends = [_map(_ends_file(path, shard), ENDS_DTYPE, shard.num_documents) for shard in meta.shards]
        for shard, ends in zip(meta.shards, self._ends, strict=True):
            if ends[-1] != shard.num_tokens:
                raise _damaged(_ends_file(path, shard), "its last document does not end where the tokens do")
        if (meta.num_tokens, meta.num_documents) != (self._starts[-1], self._first_documents[-1]):
            raise _damaged(path / META, "its counts do not add up")

    @property
    def digest(self) -> str:
        """What tells these tokens from others, in 64 hexadecimal digits. No token is read: `meta.json` has the sums."""
        parts = [self.meta.dtype, self.meta.end_id, *((each.num_tokens, each.sha256) for each in self.meta.shards)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the shards at `path` after a look at the sizes; `verify` is the thorough one."""
        try:
            text = (path / META).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UserError("T014", f"this is not a folder of packed shards: it has no readable {META}",
                            where=str(path), fix="make one with: trimaran data pack") from None  # fmt: skip
        try:
            return cls(path, TokenShardsMeta.model_validate_json(text))
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            what = ".".join(map(str, mistake["loc"])) or "it"
            raise UserError("T014", f"this is not a folder of packed shards: {what} in {META}: {mistake['msg']}",
                            where=str(path), fix="make one with: trimaran data pack") from None  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self.meta.num_tokens

    @property
    def num_documents(self) -> int:
        return self.meta.num_documents

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    def refuse_unknown(self, vocabulary: int) -> None:
        """Raise when the tokens go beyond what a model with that vocabulary knows."""
        if self.vocab_size > vocabulary:
            raise UserError("T020", f"the data has {self.vocab_size:,} token ids, the model knows {vocabulary:,}",
                            where="data.tokenizer", fix=f"set model.shape.vocab to {self.vocab_size}, "
                            "or use the model's own tokenizer")  # fmt: skip

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the shards were packed with, from their own folder."""
        return open_tokenizer(self.meta.tokenizer, self.path)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of the range as int64."""
        parts = [self._tokens[shard][low:high] for shard, low, high in self._parts(start, stop)]
        return parts[0].astype(np.int64) if len(parts) == 1 else np.concatenate(parts, dtype=np.int64)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Return for each token of the range which document it belongs to, counted from 0 over all shards, as int64."""
        parts = []
        for shard, low, high in self._parts(start, stop):
            ends = self._ends[shard]
            first, last = np.searchsorted(ends, (low, high - 1), side="right")
            lengths = np.diff(ends[first:last], prepend=low, append=high)
            parts.append(np.repeat(np.arange(first, last + 1) + self._first_documents[shard], lengths))
        return np.concatenate(parts, dtype=np.int64)

    def verify(self) -> None:
        """Raise unless every shard is byte for byte what was written. Reads everything."""
        for shard, tokens, ends in zip(self.meta.shards, self._tokens, self._ends, strict=True):
            digest = hashlib.sha256(tokens.data)
            digest.update(ends.data)
            if digest.hexdigest() != shard.sha256:
                raise _damaged(self.path / shard.file, "its checksum differs")

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, low, high) for each shard that the range touches, low and high counted inside the shard."""
        assert 0 <= start < stop <= self.num_tokens
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[shard], min(stop, self._starts[shard + 1])
            yield shard, start - base, end - base
            start, shard = end, shard + 1


def _map(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Return the memory-mapped file as a plain array: memmap's own slices are several times slower."""
    try:
        size = file.stat().st_size
        if size != count * dtype.itemsize:
            raise _damaged(file, f"it has {size:,} bytes instead of {count * dtype.itemsize:,}")
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))
    except OSError as error:
        raise _damaged(file, error.strerror or str(error)) from None


def _ends_file(path: Path, shard: Shard) -> Path:
    return (path / shard.file).with_suffix(".documents")


def _damaged(file: Path, what: str) -> UserError:
    return UserError("T015", f"a file of the packed shards is damaged: {what}", where=str(file),
                     fix=f"delete {file.parent} and pack the data again")  # fmt: skip


def rename_into_place(draft: Path, path: Path) -> None:
    """Give a finished folder its name, safe from a power cut; FileExistsError when there is something already."""
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)
    try:
        draft.rename(path)
    except OSError as error:
        if path.exists():  # ENOTEMPTY on some systems, EEXIST on others
            raise FileExistsError(error.errno, error.strerror, str(path)) from None
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

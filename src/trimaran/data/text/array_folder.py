"""Folders of memory-mapped arrays with a `meta.json`: created atomically and never modified."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel

from trimaran.core import UserError, open_regular_file, read_regular_text
from trimaran.data.text.tokenizer import Tokenizer

META, BAD = "meta.json", "bad.jsonl"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}  # of token ids


class ArrayFolderWriter:
    """Writes a new folder at `path` (see `drafted`) with the tokenizer of its ids, which are below `vocab_size`."""

    def __init__(self, path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._path, self._tokenizer, self._vocab_size, self._stack = path, tokenizer, vocab_size, ExitStack()
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"

    def __enter__(self) -> Self:
        self._draft = self._stack.enter_context(drafted(self._path))
        self._stack.callback(self._close)
        self._begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            meta = self._finish()
            (self._draft / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def _begin(self) -> None:
        raise NotImplementedError

    def _finish(self) -> BaseModel:
        """Write and close all other files, and return the content of `meta.json`."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the files that are still open."""
        raise NotImplementedError


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield a new folder next to `path`, which is renamed to `path`, durably, when the block succeeds; else removed.

    If another process created `path` meanwhile, its folder stays and FileExistsError is raised.
    """
    path = path.absolute()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    try:
        yield draft
        for file in (*draft.iterdir(), draft):
            _sync(file)
        try:
            draft.rename(path)
        except OSError as error:
            if path.exists():  # the error is ENOTEMPTY on some systems, EEXIST on others
                raise FileExistsError(error.errno, error.strerror, str(path)) from None
            raise
        _sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # no longer exists if it was renamed


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_array(file: Path, dtype: np.dtype, count: int, damaged: Callable[[Path, str], UserError]) -> np.ndarray:
    """Return a file of `count` numbers as an ndarray (fast to slice), or raise `damaged` of the file and the reason."""
    try:
        with open_regular_file(file, follow_links=True) as stream:
            if (size := os.fstat(stream.fileno()).st_size) != count * dtype.itemsize:
                raise damaged(file, f"it has {size:,} bytes instead of {count * dtype.itemsize:,}")
            return np.asarray(np.memmap(stream, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
    except OSError as error:
        raise damaged(file, error.strerror or str(error)) from None


def read_bad(folder: Path) -> list[dict[str, str]]:
    """Return what was left out when the folder was written, and why."""
    return [json.loads(line) for line in read_regular_text(folder / BAD, follow_links=True).splitlines()]


def sha256_of(file: Path) -> str:
    with open_regular_file(file, follow_links=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
